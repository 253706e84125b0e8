"""DeepSpeed's own launcher: one process on the first machine starts the ranks on all of them, by pdsh or the like.

Its `deepspeed` command hands variables on that a file `.deepspeed_env` in the folder of the launch holds, `NAME=value`
on each line. That file is there while the launcher runs; a user's own keeps its lines, and is as it was afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_state.errors import LaunchError

if TYPE_CHECKING:
    from accel_launch.config import LaunchConfig, Target

PROGRAM = "deepspeed"
ENV_FILE = ".deepspeed_env"
_DEFAULT_PORT = 29500


class EnvFile(NamedTuple):
    """What the file holds.

    Attributes:
        own: the variables of the launch.
        inherited: those of the shell that it was started from.
        left_out: names of the shell's that cannot be written, since remote shells would read them otherwise.
    """

    own: Mapping[str, str]
    inherited: Mapping[str, str]
    left_out: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without those of the shell: they may be secrets."""
        return {
            "path": ENV_FILE,
            "variables": dict(self.own),
            "inherited": sorted(self.inherited),
            "left_out": list(self.left_out),
        }

    def as_text(self) -> str:
        """A line for people."""
        text = f"file {ENV_FILE}: the variables above"
        if self.inherited:
            text += f", and of this shell {', '.join(sorted(self.inherited))}"
        return f"{text}; left out: {', '.join(self.left_out)}" if self.left_out else text


def env_file(own: Mapping[str, str], environ: Mapping[str, str]) -> EnvFile:
    """Settle what the other machines get.

    Args:
        own: the variables of the launch.
        environ: the shell's, without those that belong to another launcher.

    Raises:
        LaunchError: a variable of the launch cannot be written.
    """
    for name, text in own.items():
        if not _is_plain(text):
            raise LaunchError(
                f"{name}={text!r} cannot be handed on by DeepSpeed's launcher: a shell would read it otherwise. Use "
                "letters, digits and @%+=:,./_-, or --deepspeed-multinode-launcher standard"
            )
    inherited = {name: text for name, text in environ.items() if name not in own}
    plain = {name: text for name, text in inherited.items() if _is_plain(text)}
    return EnvFile(own, plain, tuple(sorted(name for name in inherited if name not in plain)))


def _is_plain(text: str) -> bool:
    import shlex

    return text != "" and shlex.quote(text) == text


@contextmanager
def written(file: EnvFile, folder: Path) -> Iterator[None]:
    """The file in a folder, readable by its owner only; afterwards the folder is as it was."""
    from accel_launch.writing import write_atomically

    path = folder / ENV_FILE
    before = path.read_text(encoding="utf-8") if path.exists() else None
    mode = path.stat().st_mode & 0o777 if before is not None else 0
    # what a launch that was killed left there is not the user's
    kept = [line for line in (before or "").splitlines() if not line.startswith(("ACCEL_", "ACCELERATE_"))]
    pairs = [f"{name}={text}" for name, text in file.inherited.items()], [f"{k}={v}" for k, v in file.own.items()]
    try:
        write_atomically(path, "\n".join([*pairs[0], *kept, *pairs[1], ""]), 0o600)  # of a name, the last one counts
        yield
    finally:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, before, mode)


def require_deepspeed() -> None:
    """Refuse to go on without the launcher.

    Raises:
        LaunchError: it is not installed.
    """
    import shutil

    if shutil.which(PROGRAM) is None:
        raise LaunchError(
            f"`{PROGRAM}` is not on PATH: pip install 'accel-launch[deepspeed]', or use "
            "--deepspeed-multinode-launcher standard"
        )


def deepspeed_command(config: LaunchConfig, target: Target) -> tuple[str, ...]:
    """What is run on the first machine."""
    command = [PROGRAM]
    if config.value("deepspeed_hostfile"):
        command += ["--hostfile", config.value("deepspeed_hostfile")]
    command += ["--no_local_rank", "--launcher", config.value("deepspeed_multinode_launcher") or "pdsh"]
    command += _which_devices(config)
    if config.value("main_process_ip"):
        command += ["--master_addr", config.value("main_process_ip")]
    command += ["--master_port", str(config.value("main_process_port") or _DEFAULT_PORT)]
    command += ["--module"] if target.is_module else ["--no_python"] if target.no_python else []
    return (*command, target.script, *target.arguments)


def _which_devices(config: LaunchConfig) -> Sequence[str]:
    for key, flag in (("deepspeed_exclusion_filter", "--exclude"), ("deepspeed_inclusion_filter", "--include")):
        if config.value(key):
            return [flag, config.value(key)]
    return ["--num_gpus", str(config.value("num_processes") // config.value("num_machines"))]
