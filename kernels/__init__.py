"""Tensors in, tensors out: one folder per operation, each with a plain-torch reference and its fast forms."""
