"""`python -m accel.compat script.py …`: run a script, or with `-m` a module, in which `accelerate` is accel."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from accel.compat import install

USAGE = "usage: python -m accel.compat (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main(argv: list[str]) -> None:
    """Runs what `argv` names as the main program, with the rest of it as `sys.argv`."""
    if argv[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__}")
        return
    as_module = argv[:1] == ["-m"]
    target, *arguments = argv[as_module:] or [""]
    if not target:
        raise SystemExit(USAGE)
    if not as_module and not Path(target).exists():
        raise SystemExit(f"python -m accel.compat: there is no script {target!r} in {Path.cwd()}\n{USAGE}")
    sys.argv = [target, *arguments]
    if not as_module and not sys.flags.safe_path:
        sys.path[0] = str(Path(target).resolve().parent)  # as `python script.py` has it; `-m` put the working directory
    install()
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
