"""Ranks, devices, settings, collectives and reproducible randomness for PyTorch training."""
