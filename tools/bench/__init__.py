"""Benchmarks beside the peer: ``tools/dev bench``, figures in docs/benchmarks.md."""
