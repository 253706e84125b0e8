"""What a forked rank does: load the function, run it, leave its result in a file."""

from __future__ import annotations

import atexit
import importlib
import pickle
import random
import traceback
from pathlib import Path

import cloudpickle

from accel_state.process_group import report_failure


def run(folder: Path, rank: int) -> int:
    """Run the pickled function; returns the exit code.

    Its value, or the traceback of what it raised, goes to `result-<rank>` in the folder.
    """
    _reseed()
    try:
        function, args, kwargs = pickle.loads((folder / "call").read_bytes())  # noqa: S301  (written by the test process)
        value = function(*args, **kwargs)
        outcome = cloudpickle.dumps((True, value))
        code = 0
    except BaseException as error:  # noqa: BLE001  (also SystemExit: it goes to the test process as it is)
        text = "".join(traceback.format_exception(error))
        report_failure(error)
        outcome = pickle.dumps((False, text))
        code = 1
    (folder / f"result-{rank}.part").write_bytes(outcome)
    (folder / f"result-{rank}.part").rename(folder / f"result-{rank}")
    if code == 0:
        atexit._run_exitfuncs()  # noqa: SLF001  # as at the end of a program: the process group says goodbye
    return code


def _reseed() -> None:
    """Fresh processes do not share Python's and numpy's random state; forks would."""
    random.seed()
    try:
        importlib.import_module("numpy").random.seed()
    except ImportError:
        return
