"""The signals that ask a run to end, in a module of its own: torch elastic's agent needs no more of ours."""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the last is Slurm's `--signal=USR1`
