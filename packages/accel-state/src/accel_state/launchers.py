"""How each launcher tells a process its place: torchrun, Open MPI, Intel MPI and other PMI, MVAPICH, Slurm, XLA.

One function per launcher, from the environment to the arguments of `Topology`, or to None where that launcher did not
start us. The order matters: launchers start each other (srun starts mpirun's daemons, mpirun starts torchrun), and who
came last counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_state.errors import TopologyError
from accel_state.launcher_variables import (
    DEFAULT_PORT,
    Environment,
    Place,
    check_at_most,
    check_below,
    checked_port,
    first_set,
    integer,
    needed,
    place,
    shown,
)
from accel_state.slurm import from_slurm, local_tasks, meeting_place


def place_by_launcher(environ: Environment) -> dict[str, Any] | None:
    """The arguments of `Topology` for a process that a launcher started, or None.

    None, too, for the only process of a Slurm step or an MPI run: it has nobody to meet, and two of them on one machine
    (a notebook in an allocation, a script beside it) would ask for the same port.

    Raises:
        TopologyError: variables are incomplete, not numbers, or contradict each other; names them.
    """
    for launcher in LAUNCHERS:
        found = launcher(environ)
        if found is not None:
            is_alone = found["world_size"] == 1 and launcher not in (_from_torchrun, _from_xla)
            return None if is_alone else dict(found)
    return None


# ---------------------------------------------------------------- torchrun, and everyone who sets its variables


def _from_torchrun(environ: Environment) -> Place | None:
    found = {name: integer(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    given = {name: value for name, value in found.items() if value is not None}
    if not given:  # MASTER_ADDR alone is often exported machine-wide and starts nothing
        return None
    if list(given) == ["WORLD_SIZE"] and _slurm_says(environ, given["WORLD_SIZE"]):  # exported by a batch script
        return None
    rank = needed(environ, "RANK", given)
    world_size = needed(environ, "WORLD_SIZE", given)
    check_below("RANK", rank, "WORLD_SIZE", world_size)
    local_rank = 0 if world_size == 1 and found["LOCAL_RANK"] is None else needed(environ, "LOCAL_RANK", given)
    _check_mpi_agrees(environ, rank, world_size)
    local_world_size = _local_world_size(environ, rank, local_rank, world_size)
    check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    check_at_most("LOCAL_RANK", local_rank, "RANK", rank)
    check_at_most("LOCAL_WORLD_SIZE", local_world_size, "WORLD_SIZE", world_size)
    node_rank, num_nodes = _nodes(environ, rank, local_rank, local_world_size, world_size)
    address = environ.get("MASTER_ADDR") or None
    if address is None:
        raise TopologyError(f"{shown(given)} but MASTER_ADDR is not set: set it to the host of rank 0")
    port = needed(environ, "MASTER_PORT", given)
    checked_port(port)
    return place(rank, world_size, local_rank, local_world_size, node_rank, num_nodes, address, port)


def _slurm_says(environ: Environment, world_size: int) -> bool:
    """Whether this is a Slurm task, one of so many."""
    found = from_slurm(environ)
    return found is not None and found["world_size"] == world_size


def _local_world_size(environ: Environment, rank: int, local_rank: int, world_size: int) -> int:
    """As told, or as who exported RANK from his own variables tells; else all, where nothing says otherwise."""
    told = integer(environ, "LOCAL_WORLD_SIZE") or _told_by_another(environ, rank, world_size)
    if told is not None:
        return told
    num_nodes = integer(environ, "GROUP_WORLD_SIZE") or 1
    if num_nodes == 1 and local_rank == rank:
        return world_size
    why = f"GROUP_WORLD_SIZE={num_nodes}" if local_rank == rank else f"RANK={rank} and LOCAL_RANK={local_rank} differ"
    raise TopologyError(
        f"{why}, so there are several machines, but LOCAL_WORLD_SIZE is not set: set it to the number of processes on "
        "this machine"
    )


def _told_by_another(environ: Environment, rank: int, world_size: int) -> int | None:
    """Processes on this machine, where another launcher's variables are this process's too."""
    if (told := integer(environ, "LOCAL_SIZE")) is not None:  # DeepSpeed's launcher
        return told
    mpi = (*_MPI_NAMES[0][:2], "OMPI_COMM_WORLD_LOCAL_SIZE"), (*_MPI_NAMES[1][:2], "MV2_COMM_WORLD_LOCAL_SIZE")
    for rank_name, size_name, local_name in (*mpi, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")):
        is_ours = (integer(environ, rank_name), integer(environ, size_name)) == (rank, world_size)
        if is_ours and (told := integer(environ, local_name)) is not None:
            return told
    return local_tasks(environ, rank, world_size)


def _nodes(environ: Environment, rank: int, local_rank: int, local_world_size: int, world_size: int) -> tuple[int, int]:
    """This machine's number and how many there are: as told, else as if all machines held as many processes."""
    node_rank = integer(environ, "GROUP_RANK")
    if node_rank is None:
        node_rank = (rank - local_rank) // local_world_size
    elif rank - local_rank < node_rank:  # however ranks are dealt, each machine before has at least one below this
        raise TopologyError(
            f"GROUP_RANK={node_rank} contradicts RANK={rank} and LOCAL_RANK={local_rank}: with {node_rank} machines "
            f"before this one, RANK is at least {local_rank + node_rank}"
        )
    num_nodes = integer(environ, "GROUP_WORLD_SIZE")
    if num_nodes is None:
        return node_rank, max(-(-world_size // local_world_size), node_rank + 1)
    check_below("GROUP_RANK", node_rank, "GROUP_WORLD_SIZE", num_nodes)
    elsewhere = world_size - local_world_size
    if elsewhere < num_nodes - 1 or (num_nodes == 1 and elsewhere):
        raise TopologyError(
            f"GROUP_WORLD_SIZE={num_nodes} contradicts WORLD_SIZE={world_size} and LOCAL_WORLD_SIZE="
            f"{local_world_size}: that leaves {elsewhere} processes for {num_nodes - 1} other machines"
        )
    return node_rank, num_nodes


_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def _check_mpi_agrees(environ: Environment, rank: int, world_size: int) -> None:
    """Raise where torchrun's variables and those of mpirun cannot both be this process's.

    They may differ where mpirun started a launcher that started this process: of another number of processes, or
    torchrun, which numbers them itself. A Slurm task may be the shell that such a launcher was started in.
    """
    if environ.get("TORCHELASTIC_RUN_ID"):
        return
    for rank_name, size_name, telltale in _MPI_NAMES:
        mpi_rank, mpi_size = integer(environ, rank_name), integer(environ, size_name)
        if not environ.get(telltale) or mpi_rank in (None, rank):
            continue
        if mpi_size is None or mpi_size == world_size:
            raise TopologyError(
                f"RANK={rank} contradicts {rank_name}={mpi_rank} of the same number of processes (WORLD_SIZE="
                f"{world_size}): unset the one that is not this process's, or export RANK from the other"
            )


# ---------------------------------------------------------------- MPI


def _from_mpi(rank_name: str, size_name: str, local_rank_name: str, local_size_name: str) -> Launcher:
    """A row for an MPI that sets these four variables."""

    def read(environ: Environment) -> Place | None:
        found = {name: integer(environ, name) for name in (rank_name, size_name, local_rank_name, local_size_name)}
        given = {name: value for name, value in found.items() if value is not None}
        if not given:
            return None
        rank, world_size = needed(environ, rank_name, given), needed(environ, size_name, given)
        check_below(rank_name, rank, size_name, world_size)
        is_alone = world_size == 1 and local_rank_name not in given
        local_rank = 0 if is_alone else needed(environ, local_rank_name, given)
        local_size = 1 if is_alone else needed(environ, local_size_name, given)
        check_below(local_rank_name, local_rank, local_size_name, local_size)
        check_at_most(local_rank_name, local_rank, rank_name, rank)
        check_at_most(local_size_name, local_size, size_name, world_size)
        num_nodes = -(-world_size // local_size)
        node_rank = _node_of(rank, local_rank, local_size, num_nodes)
        # the daemons that mpirun starts on other machines are steps of their own, with one machine each
        address, port = meeting_place(environ, num_nodes, given, of_job=True)
        return place(rank, world_size, local_rank, local_size, node_rank, num_nodes, address, port)

    return read


def _node_of(rank: int, local_rank: int, local_size: int, num_nodes: int) -> int:
    """MPI does not say it: ranks fill one machine after the other, or are dealt to the machines in turn."""
    node, rest = divmod(rank - local_rank, local_size)
    return min(rank - local_rank * num_nodes if rest else node, num_nodes - 1)


_from_open_mpi = _from_mpi(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_from_mvapich = _from_mpi(
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
_from_hydra = _from_mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_from_pmi = _from_mpi("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")


def _from_intel_mpi(environ: Environment) -> Place | None:
    """Intel MPI, MPICH: Hydra's variables; srun's own PMI sets PMI_RANK too, but not these, and is left to Slurm."""
    return _from_hydra(environ) if environ.get("MPI_LOCALRANKID") else None


def _from_other_pmi(environ: Environment) -> Place | None:
    """A process manager that only speaks PMI, as Cray's."""
    return _from_pmi(environ)


# ---------------------------------------------------------------- XLA


def _from_xla(environ: Environment) -> Place | None:
    """A process of torch_xla's launcher on a TPU host, or on one of several."""
    names = ("PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT")
    found = {name: integer(environ, name) for name in names}
    given = {name: value for name, value in found.items() if value is not None}
    if not given:
        return None
    local_rank, local_size = (needed(environ, name, given) for name in names)
    check_below(names[0], local_rank, names[1], local_size)
    node_name = first_set(environ, "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")
    hosts = [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    node_rank, num_nodes = integer(environ, node_name) or 0, max(len(hosts), 1)
    check_below(node_name, node_rank, "the number of TPU_WORKER_HOSTNAMES", num_nodes)
    port = integer(environ, "MASTER_PORT")
    return place(
        node_rank * local_size + local_rank,
        num_nodes * local_size,
        local_rank,
        local_size,
        node_rank,
        num_nodes,
        environ.get("MASTER_ADDR") or (hosts[0] if hosts else "127.0.0.1"),
        DEFAULT_PORT if port is None else checked_port(port),
    )


Launcher = Callable[[Environment], Place | None]

LAUNCHERS: tuple[Launcher, ...] = (
    _from_torchrun,
    _from_open_mpi,
    _from_mvapich,
    _from_intel_mpi,
    from_slurm,
    _from_other_pmi,
    _from_xla,
)
