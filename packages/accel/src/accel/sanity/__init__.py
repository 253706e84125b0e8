"""What `accel test` runs in each process: `checks` on what accel itself does, `recording` around a user's script."""
