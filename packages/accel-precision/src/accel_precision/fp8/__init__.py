"""Training in 8-bit floats: recipes, and the libraries that carry them out."""
