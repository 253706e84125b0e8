"""Models that are larger than one device: where each tensor lies, and the hooks that bring it to where it is used."""
