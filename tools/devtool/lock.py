"""``tools/dev lock``: a lock file without hosts and without torch (docs/decisions/locking.md)."""

from __future__ import annotations

import re

from devtool.environment import UV, installer_environment
from devtool.paths import ROOT, must_run, run

LOCK = ROOT / "uv.lock"


def run_lock(*, upgrade: bool = False, check: bool = False) -> int:
    """Resolve the workspace anew and take the hosts out, or only check that the lock is up to date."""
    uv_lock = [UV, "lock", "--quiet", "--no-config"]
    if check:
        return run([*uv_lock, "--check"], env=installer_environment())
    before = LOCK.read_text() if LOCK.exists() else ""
    must_run([*uv_lock, *(["--upgrade"] if upgrade else [])], env=installer_environment())
    LOCK.write_text(without_hosts(LOCK.read_text()))
    must_run([*uv_lock, "--check"], env=installer_environment())
    print("uv.lock is unchanged" if LOCK.read_text() == before else "uv.lock is written")
    return 0


def without_hosts(text: str) -> str:
    """Name files instead of addresses; hashes stay, so whatever index serves them is checked."""
    text = re.sub(r'registry = "https?://[^"]*"', 'registry = "wheelhouse"', text)
    return re.sub(r'url = "https?://[^"]*/([^"/]+)"', r'path = "\1"', text)
