"""Parallelism for PyTorch as an ordered plan of small, checkable steps."""
