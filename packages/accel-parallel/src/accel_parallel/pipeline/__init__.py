"""One model as a pipeline of stages: where it is cut, what a rank holds, and in which order micro-batches pass."""
