"""Inputs that nobody should send.

Each module of `targets.py` has one property, `one_input(data)`, which hypothesis (`test_fuzz.py`) and atheris
(`python -m tests.fuzz TARGET`) feed with bytes: it returns, or raises what is wrong.
"""
