"""How much memory a model needs, by the shapes of its weights alone."""

from accel.memory.estimates import Axes, Estimate, estimate, parse_axes, table
from accel.memory.weights import Weight, find_weights

__all__ = ["Axes", "Estimate", "Weight", "estimate", "find_weights", "parse_axes", "table"]
