"""Transactional, pickle-free checkpoints for PyTorch that load on any world size."""
