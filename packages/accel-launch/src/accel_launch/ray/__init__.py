"""Ray as an engine: it places the ranks on the machines of its cluster, and starts them there."""
