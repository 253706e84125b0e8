"""``tools/dev lint``: every checker runs, whatever the ones before it said."""

from __future__ import annotations

import subprocess
import sys
import time

from devtool.paths import BIN, ROOT, packages

TYPED = ("tools/devtool", "tools/bench")


def run_lint() -> int:
    """Run ruff's linter and formatter, import-linter and mypy; returns 1 when one of them complained."""
    sources = [f"packages/{package}/src" for package in packages()] + [path for path in TYPED if (ROOT / path).is_dir()]
    checks = {
        "ruff check": ["ruff", "check", "--quiet", "."],
        "ruff format": ["ruff", "format", "--check", "--quiet", "."],
        "import-linter": ["lint-imports", "--no-cache"],
        "mypy": ["mypy", "--no-error-summary", *sources],
    }
    failed = []
    for name, command in checks.items():
        start = time.monotonic()
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=ROOT, check=False, capture_output=True, text=True
        )
        print(
            f"{name:<14} {'ok' if done.returncode == 0 else 'FAILED':<6} {time.monotonic() - start:5.1f} s", flush=True
        )
        if done.returncode != 0:
            failed.append(name)
            print(done.stdout + done.stderr, flush=True)
    if failed:
        fix = " (tools/dev lint only looks; `.venv/bin/ruff check --fix . && .venv/bin/ruff format .` repairs)"
        print(
            f"lint: {', '.join(failed)} failed{fix if any('ruff' in name for name in failed) else ''}", file=sys.stderr
        )
    return 1 if failed else 0
