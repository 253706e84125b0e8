"""Shard any PyTorch DataLoader exactly, and resume it at any batch."""
