"""Subcommands of `accel` that need the whole of it; importing them imports no torch."""
