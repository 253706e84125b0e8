"""Talking to the other ranks: collectives over nested data."""
