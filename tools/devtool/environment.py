"""Set up ``.venv``: what is missing is installed, what is there costs a hash and a look.

Steps, in order: the virtual environment, torch, uv, the pinned packages of ``uv.lock``, the members in editable form.
``.venv/accel-dev.json`` records under which key each step was finished and which one is running, so that

- nothing is done twice: a step whose key is unchanged is skipped;
- an interrupted or failed step is done again from scratch: pip can leave halves of packages that even a forced
  reinstallation does not mend, so the environment is made anew; what uv installs is installed again by uv.

torch's build is the user's choice and never comes from the lock: see docs/decisions/locking.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from devtool.paths import CACHE, PYTHON, ROOT, VENV, DevError, must_run, output_of, packages, pyproject, say

TORCH_VERSION = "2.13.0"
TORCH_OLDEST = (2, 9)
UV_REQUIREMENT = "uv>=0.13"
UV = VENV / "bin" / "uv"
TESTKIT = ROOT / "tools" / "testkit"
STATE = VENV / "accel-dev.json"
EXISTING_TORCH = "accel-existing-torch.pth"

State = dict[str, str]


def ensure(torch: str | None = None) -> None:
    """Bring ``.venv`` up to date.

    Args:
        torch: ``auto``, ``existing``, ``cpu``, ``cuda`` or a pip requirement; ``None`` keeps what is installed
            (``auto`` at first: a torch of the interpreter that runs this, else the tested release).

    Raises:
        DevError: a step failed, or an existing torch was asked for and there is none.
    """
    keys = _keys()
    if torch is None and _is_current(_read_state(), keys):
        return
    with _exclusively():
        state = _read_state()
        if torch is None and _is_current(state, keys):  # another tools/dev did it while this one waited
            return
        _set_up(state, keys, _torch_source(torch, state))


def installer_environment() -> dict[str, str]:
    """The environment for pip and uv: index, proxy, cache and certificates are the user's, nothing redirects."""
    kept_uv: tuple[str, ...] = (
        "INDEX",
        "DEFAULT_INDEX",
        "EXTRA_INDEX",
        "FIND_LINKS",
        "CACHE_DIR",
        "LINK_MODE",
        "HTTP",
        "NATIVE_TLS",
    )
    kept_uv += ("SYSTEM_CERTS", "KEYRING", "INSECURE", "CONCURRENT", "OFFLINE")
    kept_pip: tuple[str, ...] = (
        "INDEX_URL",
        "EXTRA_INDEX_URL",
        "FIND_LINKS",
        "NO_INDEX",
        "CONSTRAINT",
        "CONFIG_FILE",
        "PROXY",
        "CERT",
    )
    kept_pip += ("CLIENT_CERT", "TRUSTED_HOST", "CACHE_DIR", "NO_CACHE_DIR", "RETRIES", "TIMEOUT", "DEFAULT_TIMEOUT")
    kept_pip += ("KEYRING_PROVIDER", "PRE", "USE_FEATURE")
    dropped = {"PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped
        and not (name.startswith("UV_") and not name[3:].startswith(kept_uv))
        and not (name.startswith("PIP_") and name[4:] not in kept_pip)
    }
    environment.update(PIP_USER="0", PIP_REQUIRE_HASHES="0", PIP_NO_DEPS="0", PIP_NO_INPUT="1")
    environment.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONNOUSERSITE="1")
    return environment


def export_pins(target: Path, *selection: str) -> Path:
    """Write hash-pinned requirements from ``uv.lock`` for a selection, such as ``--package accel --all-extras``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [UV, "export", "--quiet", "--no-config", "--frozen", "--no-emit-workspace", *selection, "--output-file"]
    must_run([*command, target], env=installer_environment())
    return target


def light_extras(package: str | None = None) -> list[str]:
    """What selects, for ``export_pins``, all extras but those of the engines tier (``tools/devtool/engines.py``).

    Their libraries are many and large, so they never enter ``.venv``; the list is in the workspace's pyproject.toml.

    Args:
        package: the one whose pins are exported; all by default.
    """
    locked = {entry["name"]: entry for entry in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    members = [package] if package else packages()
    known = {extra for name in members for extra in locked.get(name, {}).get("optional-dependencies", {})}
    # uv writes an extra's name with dashes, and refuses one that the lock does not know yet
    heavy = {extra.replace("_", "-") for extra in pyproject()["tool"]["accel"]["engine-extras"]} & known
    return ["--all-extras", *(word for extra in sorted(heavy) for word in ("--no-extra", extra))]


def install_pins(python: Path, pins: Path, *, again: bool = False) -> None:
    """Install exported pins into an environment: hashes checked, dependencies never resolved anew."""
    if not any(line.strip() and not line.startswith("#") for line in pins.read_text().splitlines()):
        return
    command = [UV, "pip", "install", "--quiet", "--no-config", "--python", python, "--require-hashes", "--no-deps"]
    try:
        must_run([*command, *(["--reinstall"] if again else []), "-r", pins], env=_uv_environment())
    except DevError as error:
        raise DevError(
            f"{error}\nIf it is the index: uv's configuration files are not read here; UV_DEFAULT_INDEX=<address> "
            "names another one, and so does pip's index-url."
        ) from None


# ------------------------------------------------------------------ state


def _keys() -> dict[str, str]:
    """What the pins and the members depend on."""
    pins = hashlib.sha256()
    for name in ("uv.lock", "pyproject.toml"):
        pins.update((ROOT / name).read_bytes())
    members = hashlib.sha256(str(ROOT).encode())
    for package in packages():
        members.update(package.encode() + (ROOT / "packages" / package / "pyproject.toml").read_bytes())
    return {"uv": UV_REQUIREMENT, "pins": pins.hexdigest(), "members": members.hexdigest()}


def _is_current(state: State, keys: dict[str, str]) -> bool:
    source = Path(state.get("torch", "").removeprefix("existing:"))
    torch_is_there = "torch" in state and (not source.is_absolute() or (source / "torch").is_dir())
    done = all(state.get(name) == key for name, key in keys.items())
    return done and "running" not in state and torch_is_there and os.access(PYTHON, os.X_OK)


def _read_state() -> State:
    try:
        state = json.loads(STATE.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _write_state(state: State) -> None:
    new = STATE.with_suffix(".new")
    new.write_text(json.dumps(state, indent=1))
    new.replace(STATE)


@contextmanager
def _exclusively() -> Iterator[None]:
    """Let one set-up work on a checkout at a time; the lock goes with the process that holds it."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "setup.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another tools/dev is setting up; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------ steps


def _set_up(state: State, keys: dict[str, str], torch: str) -> None:
    interrupted = state.get("running")
    if interrupted in ("torch", "uv") or not _venv_works():
        state, interrupted = {}, None
        _make_venv()

    steps: list[tuple[str, str, str, Callable[[bool], None]]] = [
        ("torch", torch, _torch_words(torch), lambda _again: _install_torch(torch)),
        ("uv", keys["uv"], "uv", _install_uv),
        ("pins", keys["pins"], "the packages pinned in uv.lock", _install_all_pins),
        ("members", keys["members"], "the workspace's packages, in editable form", _install_members),
    ]
    for name, key, words, step in steps:
        if state.get(name) == key and interrupted != name:
            continue
        say(f"installing {words}")
        state["running"] = name
        _write_state(state)
        step(interrupted == name)
        del state["running"]
        state[name] = key
        _write_state(state)


def _venv_works() -> bool:
    """Whether there is an environment to build on, ours or one that somebody made by hand."""
    check = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    if not os.access(PYTHON, os.X_OK):
        return False
    return subprocess.run([PYTHON, "-c", check], check=False, capture_output=True).returncode == 0


def _make_venv() -> None:
    base = getattr(sys, "_base_executable", sys.executable) or sys.executable
    say(f"making {VENV.relative_to(ROOT)} with Python {sys.version.split()[0]}")
    STATE.unlink(missing_ok=True)  # an interruption from here on must not leave a state that looks finished
    try:
        must_run([base, "-m", "venv", "--clear", VENV], env=installer_environment())
    except DevError as error:
        raise DevError(
            f"{error}\nPython's venv module is needed; on Debian and Ubuntu: apt-get install python3-venv"
        ) from None


def _torch_source(asked: str | None, state: State) -> str:
    """Which torch to have: a pip requirement, or ``existing:FOLDER``."""
    if asked is None and "torch" in state:
        return state["torch"]
    if asked in (None, "auto"):
        folder = _existing_torch()
        return f"existing:{folder}" if folder else f"torch=={TORCH_VERSION}"
    if asked == "existing":
        folder = _existing_torch()
        if folder is None:
            oldest = ".".join(map(str, TORCH_OLDEST))
            raise DevError(
                f"--torch existing: {sys.executable} has no torch {oldest} or newer. Start tools/dev by the Python "
                "that has it (/path/to/python tools/dev setup --torch existing), or leave --torch out to install one."
            )
        return f"existing:{folder}"
    if asked == "cpu":
        return f"torch=={TORCH_VERSION}+cpu" if sys.platform.startswith("linux") else f"torch=={TORCH_VERSION}"
    if asked == "cuda":
        return f"torch=={TORCH_VERSION},!={TORCH_VERSION}+cpu"
    if not asked.startswith("torch"):
        raise DevError(
            f"--torch {asked!r} is neither auto, existing, cpu, cuda nor a requirement such as 'torch==2.12.1'."
        )
    return asked


def _existing_torch() -> Path | None:
    """The folder from which the running interpreter imports a torch that is new enough."""
    import importlib.metadata
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).resolve().parents[1]
    version = importlib.metadata.version("torch")
    if folder.is_relative_to(VENV.resolve()) or tuple(map(int, version.split(".")[:2])) < TORCH_OLDEST:
        return None
    return folder


def _torch_words(torch: str) -> str:
    return f"a link to the torch in {torch[9:]}" if torch.startswith("existing:") else f"{torch} (by pip, once)"


def _install_torch(torch: str) -> None:
    site = _site_packages()
    link = site / EXISTING_TORCH
    if torch.startswith("existing:"):
        if (site / "torch").is_dir():  # one that was installed earlier would come first on the path
            must_run([PYTHON, "-m", "pip", "uninstall", "--quiet", "--yes", "torch"], env=installer_environment())
        link.write_text(torch.removeprefix("existing:") + "\n")
    else:
        link.unlink(missing_ok=True)
        try:
            must_run([PYTHON, "-m", "pip", "install", "--quiet", torch], env=installer_environment())
        except DevError as error:
            raise DevError(
                f"{error}\nA build that your package index lacks needs its index too, for example "
                "PIP_EXTRA_INDEX_URL=<the one that pytorch.org names> tools/dev setup --torch cpu"
            ) from None
    works = subprocess.run([PYTHON, "-c", "import torch; print(torch.__version__)"], check=False, capture_output=True)
    if works.returncode != 0:
        raise DevError(f"this torch cannot be imported ({torch}):\n{works.stderr.decode(errors='replace')}")


def _install_uv(_again: bool) -> None:
    must_run([PYTHON, "-m", "pip", "install", "--quiet", UV_REQUIREMENT], env=installer_environment())


def _install_all_pins(again: bool) -> None:
    pins = export_pins(CACHE / "pins.txt", "--all-packages", *light_extras(), "--group", "dev")
    install_pins(PYTHON, pins, again=again)


def _install_members(again: bool) -> None:
    command: list[object] = [UV, "pip", "install", "--quiet", "--no-config", "--python", PYTHON, "--no-deps"]
    command += ["--no-build-isolation", *(["--reinstall"] if again else [])]
    for package in packages():
        command += ["-e", ROOT / "packages" / package]  # one -e each: a glob would make only the first editable
    must_run(command, env=_uv_environment())
    (_site_packages() / "accel-testkit.pth").write_text(f"{TESTKIT / 'src'}\n")


def _site_packages() -> Path:
    found = output_of([PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    return Path(found.strip())


def _uv_environment() -> dict[str, str]:
    """As for pip, and a package index that only pip was told about serves uv as well.

    Certificates that the machine trusts count, where it has a store of them: uv's own know nothing of a local proxy.
    """
    environment = installer_environment()
    if ssl.get_default_verify_paths().cafile:
        environment.setdefault("UV_SYSTEM_CERTS", "true")
    if not any(name in environment for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
        listed = output_of([PYTHON, "-m", "pip", "config", "list"], env=environment)
        settings = dict(line.split("=", 1) for line in listed.splitlines() if "=" in line)
        for name in (":env:.index-url", "install.index-url", "global.index-url"):
            if name in settings:
                environment["UV_DEFAULT_INDEX"] = settings[name].strip("'\"")
                break
    return environment
