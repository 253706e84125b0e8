"""`import accelerate` answered by accel: for existing scripts, and for libraries that import `accelerate` themselves.

    import accel.compat
    accel.compat.install()                 # before anything imports accelerate
    from transformers import Trainer       # finds `accelerate` 1.15.0, which is accel

or, without touching a script: `python -m accel.compat script.py`, `accel launch --as-accelerate script.py`.

A folder, `accel/_alias`, holds a package `accelerate` and its metadata; `install()` puts it first on the import path.
So it wins over an installed `accelerate` wherever it is asked for, for `import`, `importlib.util.find_spec` and
`importlib.metadata`, and nowhere else.
"""

from accel.compat.install import ALIAS_FOLDER, child_environment, install

API_LEVEL = "1.15.0"
"""The version of accelerate's API that the alias follows, which it gives as its own version."""

__all__ = ["ALIAS_FOLDER", "API_LEVEL", "child_environment", "install"]
