"""The engine for one machine without restarts: our own, without torch."""
