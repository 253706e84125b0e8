"""Mixed precision that never surprises, for plain PyTorch models."""
