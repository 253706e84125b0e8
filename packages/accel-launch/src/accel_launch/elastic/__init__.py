"""Torch elastic as an engine: restarts, and several machines."""
