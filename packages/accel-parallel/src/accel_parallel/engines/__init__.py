"""Who owns the training loop's backward and update: torch itself, or a library that replaces them."""
