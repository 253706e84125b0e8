"""Start training processes on one machine or many, from one command."""
