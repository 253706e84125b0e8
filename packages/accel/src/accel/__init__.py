"""The training-loop library for PyTorch: the complete Accelerator."""
