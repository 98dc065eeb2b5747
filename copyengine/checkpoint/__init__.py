"""Checkpoint directories: safetensors index and readers, tensor names per dialect, the built-in model."""
