"""Exit codes with a meaning; torch-free, and read at every launch."""

from typing import Final

STOPPED_EXIT_CODE: Final = 75
"""How a run leaves that was asked to stop, saved, and can go on later: `EX_TEMPFAIL` of BSD's sysexits.h.

`accel launch` hands it on, torch elastic does not start such ranks again, and the script of `accel slurm --requeue`
queues such a job anew.
"""
