"""Processes started by `mpirun`: Open MPI, Intel MPI (Hydra, MPICH) and MVAPICH differ in their words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel_state.errors import LaunchError

if TYPE_CHECKING:
    from accel_launch.config import LaunchConfig

_DEFAULT_PORT = 29500


def find_mpi() -> str:
    """Which `mpirun` is here: `openmpi`, `hydra` or `mvapich`.

    Raises:
        LaunchError: none is, or it does not say what it is.
    """
    import shutil  # here: both are slow to import, and every launch imports this module
    import subprocess

    if shutil.which("mpirun") is None:
        raise LaunchError("mpirun is not on PATH: install Open MPI, Intel MPI or MVAPICH, or use another --launcher")
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    words = done.stdout + done.stderr
    for text, kind in (("Open MPI", "openmpi"), ("Intel", "hydra"), ("HYDRA", "hydra"), ("mvapich", "mvapich")):
        if text.lower() in words.lower():
            return kind
    raise LaunchError(f"`mpirun --version` is none of Open MPI, Intel MPI, MPICH and MVAPICH: {words.strip()[:200]!r}")


def mpi_command(
    config: LaunchConfig, script: tuple[str, ...], variables: Mapping[str, str], kind: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command that starts all processes, and the variables that it starts with.

    The processes find their ranks in the variables that MPI sets; they get ours by name.

    Args:
        config: the launch.
        script: what each process runs.
        variables: what each process gets.
        kind: as `find_mpi` says it.
    """
    hostfile = config.value("mpirun_hostfile")
    here = {"MASTER_ADDR": _first_host(hostfile) or config.value("main_process_ip") or "127.0.0.1"}
    here["MASTER_PORT"] = str(config.value("main_process_port") or _DEFAULT_PORT)
    given = {**variables, **here}
    world_size, per_machine = (
        config.value("num_processes"),
        config.value("num_processes") // config.value("num_machines"),
    )
    command = ["mpirun"]
    if kind == "openmpi":
        command += ["-np", str(world_size), *(("--hostfile", hostfile) if hostfile else ())]
        command += (
            ["--map-by", f"ppr:{per_machine}:node", "--bind-to", "none"]
            if config.value("num_machines") > 1
            else ["--bind-to", "none"]
        )
        for name in given:
            command += ["-x", name]
    elif kind == "hydra":
        command += ["-n", str(world_size), "-ppn", str(per_machine), *(("-f", hostfile) if hostfile else ())]
        command += ["-genvlist", ",".join(given)]
    else:
        command += ["-np", str(world_size), *(("-hostfile", hostfile) if hostfile else ())]
        command += [f"{name}={text}" for name, text in given.items()]
    return (*command, *script), given


def _first_host(hostfile: str | None) -> str | None:
    if hostfile is None:
        return None
    try:
        lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LaunchError(f"--mpirun-hostfile {hostfile} cannot be read: {error.strerror}") from None
    hosts = [line.split("#")[0].split() for line in lines]
    names = [words[0].partition(":")[0] for words in hosts if words]
    if not names:
        raise LaunchError(f"--mpirun-hostfile {hostfile} names no host: write one on each line")
    return names[0]
