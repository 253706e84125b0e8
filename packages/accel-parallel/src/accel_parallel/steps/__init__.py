"""One module per step of a plan."""
