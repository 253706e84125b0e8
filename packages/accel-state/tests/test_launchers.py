"""What launchers other than torchrun set, and every way in which it can be incomplete or contradictory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accel_state.errors import TopologyError
from accel_state.slurm import expand_hosts
from accel_state.topology import Topology

# Rank 5 of 6 on the second of two machines, as each launcher says it (what it sets beside is shortened).
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "OMPI_UNIVERSE_SIZE": "6",
    "OMPI_APP_CTX_NUM_PROCS": "6",
    "OMPI_ARGV": "train.py",
    "OMPI_COMMAND": "python",
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "prterun-n1-4242@1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29501",
}
INTEL_MPI = {
    "PMI_RANK": "5",
    "PMI_SIZE": "6",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "2",
    "MPI_LOCALNRANKS": "3",
    "I_MPI_INFO_NUMA_NODE_NUM": "2",
    "HYDI_CONTROL_FD": "8",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29501",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "6",
    "MV2_COMM_WORLD_LOCAL_RANK": "2",
    "MV2_COMM_WORLD_LOCAL_SIZE": "3",
    "MPISPAWN_ID": "1",
    "MPIRUN_RANK": "5",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29501",
}
CRAY_PMI = {
    "PMI_RANK": "5",
    "PMI_SIZE": "6",
    "PMI_LOCAL_RANK": "2",
    "PMI_LOCAL_SIZE": "3",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29501",
}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "3(x2)",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_STEP_NODELIST": "n[1,7]",
    "SLURM_JOB_NODELIST": "n[1,7]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "PMI_RANK": "5",  # of srun --mpi=pmi2
    "PMI_SIZE": "6",
    "MASTER_PORT": "29501",
}
XLA = {
    "PJRT_DEVICE": "TPU",
    "PJRT_LOCAL_PROCESS_RANK": "2",
    "PJRT_LOCAL_PROCESS_COUNT": "3",
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "n1,n7",
    "MASTER_PORT": "29501",
}
ALL = {
    "Open MPI": OPEN_MPI,
    "Intel MPI": INTEL_MPI,
    "MVAPICH": MVAPICH,
    "Cray PMI": CRAY_PMI,
    "Slurm": SLURM,
    "XLA": XLA,
}


@pytest.mark.parametrize("launcher", ALL)
def test_each_launcher_says_the_same(launcher: str) -> None:
    assert Topology.from_env(ALL[launcher]) == Topology(5, 6, 2, 3, 1, 2, "n1", 29501)


@pytest.mark.parametrize(
    ("variables", "topology"),
    [
        # mpirun -np 2 on one machine, without anything exported
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Topology(1, 2, 1, 2, 0, 1, "127.0.0.1", 29500),
        ),
        # ranks dealt to the machines in turn: mpirun --map-by node
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            Topology(2, 6, 1, 3, 0, 2, "n1", 29501),
        ),
        # mpirun within a Slurm job: the machines are known, and SLURM_PROCID is that of mpirun's daemon
        (
            {key: text for key, text in {**SLURM, **OPEN_MPI, "SLURM_PROCID": "1"}.items() if key != "MASTER_ADDR"},
            Topology(5, 6, 2, 3, 1, 2, "n1", 29501),
        ),
        # mpirun within a batch job, a rank on the second machine: its daemon is a step of its own, there alone
        (
            {
                **{key: text for key, text in OPEN_MPI.items() if key != "MASTER_ADDR"},
                "SLURM_JOB_ID": "4242",
                "SLURM_JOB_NODELIST": "n[1-2]",
                "SLURM_STEP_NODELIST": "n2",
                "SLURM_PROCID": "0",
            },
            Topology(5, 6, 2, 3, 1, 2, "n1", 29501),
        ),
        # one process alone has nobody to meet: two of them on a machine must not ask for one port
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Topology()),
        (
            {
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "4294967290",
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_TASKS_PER_NODE": "1",
                "SLURM_STEP_NODELIST": "n1",
            },
            Topology(),
        ),
        # a wrapper that exports torchrun's names from Slurm's, which say how many tasks the machine has
        (
            {**SLURM, "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            Topology(5, 6, 2, 3, 1, 2, "h", 1),
        ),
        # a batch script that exports the number of tasks
        ({**SLURM, "WORLD_SIZE": "6"}, Topology.from_env(SLURM)),
        # DeepSpeed's launcher
        (
            {
                "RANK": "9",
                "WORLD_SIZE": "16",
                "LOCAL_RANK": "1",
                "LOCAL_SIZE": "8",
                "CROSS_RANK": "1",
                "CROSS_SIZE": "2",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "1",
            },
            Topology(9, 16, 1, 8, 1, 2, "h", 1),
        ),
        # the same names exported by hand under mpirun
        (
            {**OPEN_MPI, "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "2"},
            Topology(5, 6, 2, 3, 1, 2, "n1", 29501),
        ),
        # srun with unequal machines: 2 tasks on each of three, 1 on the last
        (
            {
                **SLURM,
                "SLURM_PROCID": "6",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "3",
                "SLURM_STEP_NUM_TASKS": "7",
                "SLURM_STEP_NUM_NODES": "4",
                "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
                "SLURM_STEP_NODELIST": "n[1-3,7]",
            },
            Topology(6, 7, 0, 1, 3, 4, "n1", 29501),
        ),
        # only what older Slurm sets, and a port of the job's own
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": "1",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "gpu07",
            },
            Topology(1, 2, 1, 2, 0, 1, "gpu07", 20217),
        ),
        # the script of a batch job is a process on its own, whatever the job has
        (
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
            Topology(),
        ),
        # one TPU host
        (
            {"PJRT_LOCAL_PROCESS_RANK": "3", "PJRT_LOCAL_PROCESS_COUNT": "4"},
            Topology(3, 4, 3, 4, 0, 1, "127.0.0.1", 29500),
        ),
        # torchrun started by srun: who came last counts
        (
            {
                **SLURM,
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "1",
            },
            Topology(1, 2, 1, 2, 0, 1, "h", 1),
        ),
    ],
)
def test_other_ways_to_start(variables: dict[str, str], topology: Topology) -> None:
    assert Topology.from_env(variables) == topology


def changed(variables: dict[str, str], **changes: str | None) -> dict[str, str]:
    return {key: text for key, text in {**variables, **changes}.items() if text is not None}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (changed(OPEN_MPI, OMPI_COMM_WORLD_RANK="6"), "OMPI_COMM_WORLD_RANK=6 contradicts OMPI_COMM_WORLD_SIZE=6"),
        (changed(OPEN_MPI, OMPI_COMM_WORLD_SIZE=None), "OMPI_COMM_WORLD_RANK=5 and .* but OMPI_COMM_WORLD_SIZE is not"),
        (changed(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_RANK="3"), "LOCAL_RANK=3 contradicts OMPI_COMM_WORLD_LOCAL_SIZE=3"),
        (changed(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="x"), "OMPI_COMM_WORLD_LOCAL_SIZE='x' is not a number"),
        (changed(OPEN_MPI, MASTER_ADDR=None), "OMPI_COMM_WORLD_RANK=5 .* 2 machines, but MASTER_ADDR is not set"),
        (changed(OPEN_MPI, MASTER_PORT="0"), "MASTER_PORT=0 is not a port"),
        (changed(INTEL_MPI, PMI_SIZE=None), "PMI_RANK=5 and .* but PMI_SIZE is not set"),
        (changed(INTEL_MPI, MPI_LOCALNRANKS=None), "but MPI_LOCALNRANKS is not set"),
        (
            changed(MVAPICH, MV2_COMM_WORLD_LOCAL_SIZE="7"),
            "_LOCAL_SIZE=7 contradicts MV2_COMM_WORLD_SIZE=6",
        ),
        (changed(CRAY_PMI, PMI_LOCAL_RANK=None), "PMI_RANK=5 and .* but PMI_LOCAL_RANK is not set"),
        (changed(SLURM, SLURM_PROCID="6"), "SLURM_PROCID=6 contradicts SLURM_STEP_NUM_TASKS=6"),
        (changed(SLURM, SLURM_LOCALID="3"), "SLURM_LOCALID=3 contradicts the 3 tasks .* SLURM_STEP_TASKS_PER_NODE"),
        (changed(SLURM, SLURM_NODEID="2"), "SLURM_NODEID=2 contradicts SLURM_STEP_NUM_NODES=2"),
        (changed(SLURM, SLURM_LOCALID=None), "SLURM_PROCID=5 but SLURM_LOCALID is not set"),
        (
            changed(SLURM, SLURM_STEP_TASKS_PER_NODE="3(x3)"),
            r"=3\(x3\) contradicts SLURM_STEP_NUM_TASKS=6",
        ),
        (changed(SLURM, SLURM_STEP_TASKS_PER_NODE="3*2"), "SLURM_STEP_TASKS_PER_NODE='3\\*2' is not a list of tasks"),
        (changed(SLURM, SLURM_STEP_NODELIST="n1"), "SLURM_STEP_NUM_NODES=2 contradicts the machines of the job: n1"),
        (changed(SLURM, SLURM_STEP_NODELIST="n[1,7"), r"'n\[1,7' has a bracket that is not closed"),
        (
            changed(SLURM, SLURM_PROCID="2"),
            r"SLURM_PROCID=2 contradicts SLURM_NODEID=1 and SLURM_LOCALID=2 .*: that place has number 5",
        ),
        (
            changed(
                SLURM,
                SLURM_NODEID="1",
                SLURM_PROCID="3",
                SLURM_LOCALID="0",
                SLURM_STEP_NUM_TASKS="4",
                SLURM_STEP_NUM_NODES="4",
                SLURM_STEP_TASKS_PER_NODE="1(x4)",
                SLURM_STEP_NODELIST="n[1-4]",
            ),
            r"SLURM_PROCID=3 contradicts SLURM_NODEID=1 and SLURM_LOCALID=0 with SLURM_STEP_TASKS_PER_NODE=1\(x4\)",
        ),
        (changed(XLA, PJRT_LOCAL_PROCESS_COUNT=None), "but PJRT_LOCAL_PROCESS_COUNT is not set"),
        (changed(XLA, PJRT_LOCAL_PROCESS_RANK="3"), "PJRT_LOCAL_PROCESS_RANK=3 contradicts PJRT_LOCAL_PROCESS_COUNT=3"),
        (changed(XLA, TPU_WORKER_ID="2"), "TPU_WORKER_ID=2 contradicts the number of TPU_WORKER_HOSTNAMES=2"),
    ],
)
def test_what_does_not_fit_is_named(variables: dict[str, str], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        Topology.from_env(variables)


def torchrun(rank: int, world_size: int, local_rank: int, local_world_size: int, **others: str) -> dict[str, str]:
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "n1", "MASTER_PORT": "29501"} | others


def mpi(rank: int, size: int) -> dict[str, str]:
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), **local}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (torchrun(0, 2, 0, 2) | mpi(1, 2), "RANK=0 contradicts OMPI_COMM_WORLD_RANK=1 of the same number of processes"),
        (torchrun(0, 2, 0, 2, OMPI_COMM_WORLD_RANK="1"), "RANK=0 contradicts OMPI_COMM_WORLD_RANK=1"),
        (torchrun(1, 4, 1, 2, MV2_COMM_WORLD_RANK="3", MV2_COMM_WORLD_SIZE="4"), "contradicts MV2_COMM_WORLD_RANK=3"),
        (torchrun(1, 4, 1, 2, PMI_RANK="3", PMI_SIZE="4", MPI_LOCALRANKID="1"), "RANK=1 contradicts PMI_RANK=3"),
        (torchrun(1, 4, 1, 2, GROUP_WORLD_SIZE="1"), "GROUP_WORLD_SIZE=1 contradicts WORLD_SIZE=4 and LOCAL_WORLD_SI"),
        (torchrun(1, 4, 1, 3, GROUP_WORLD_SIZE="3"), "that leaves 1 processes for 2 other machines"),
        (torchrun(1, 2, 1, 2, GROUP_RANK="1"), "GROUP_RANK=1 contradicts RANK=1 and LOCAL_RANK=1"),
        (
            changed(torchrun(0, 4, 0, 2, GROUP_WORLD_SIZE="2"), LOCAL_WORLD_SIZE=None),
            "=2, so .* LOCAL_WORLD_SIZE is not",
        ),
    ],
)
def test_torchruns_variables_that_contradict_each_other_or_mpiruns(variables: dict[str, str], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        Topology.from_env(variables)


@pytest.mark.parametrize(
    "variables",
    [
        # mpirun starts one torchrun per machine: ranks are torchrun's, in whatever order its agents met
        torchrun(3, 4, 1, 2, GROUP_RANK="1", GROUP_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="7") | mpi(1, 2),
        torchrun(0, 2, 0, 1, GROUP_RANK="0", GROUP_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="7") | mpi(1, 2),
        # mpirun starts one launcher per machine, or only one
        torchrun(3, 4, 1, 2) | mpi(1, 2),
        torchrun(3, 4, 3, 4) | mpi(0, 1),
        # a script of mpirun's exports torchrun's names
        torchrun(1, 2, 1, 2) | mpi(1, 2),
        # mpirun starts runs of one process each
        torchrun(0, 1, 0, 1) | mpi(1, 2),
        # srun starts one torchrun per machine, or a shell in which a launcher is started
        torchrun(3, 4, 1, 2, TORCHELASTIC_RUN_ID="7") | SLURM,
        torchrun(3, 6, 3, 6) | {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        # the same, with srun's own PMI
        torchrun(3, 6, 3, 6, PMI_RANK="0", PMI_SIZE="6"),
        # ranks dealt to machines in turn
        torchrun(2, 4, 1, 2, GROUP_RANK="0", GROUP_WORLD_SIZE="2"),
        # machines with unequally many
        torchrun(3, 4, 0, 1, GROUP_RANK="1", GROUP_WORLD_SIZE="2"),
    ],
)
def test_variables_of_two_launchers_may_be_there(variables: dict[str, str]) -> None:
    variables = {**variables, "MASTER_ADDR": "n1"}
    found = Topology.from_env(variables)
    assert (found.rank, found.local_rank) == (int(variables["RANK"]), int(variables["LOCAL_RANK"]))


@pytest.mark.parametrize(
    ("node", "local", "rank"), [(0, 1, 1), (1, 0, 1), (1, 2, 5), (0, 2, 4), (1, 1, 3), (0, 2, 2), (1, 1, 4)]
)
def test_slurm_may_deal_tasks_in_blocks_in_turn_or_in_planes(node: int, local: int, rank: int) -> None:
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
    assert Topology.from_env({**SLURM, **place}).rank == rank


def test_slurm_may_be_told_where_each_task_goes() -> None:
    anywhere = {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "1", "SLURM_DISTRIBUTION": "arbitrary"}
    assert Topology.from_env({**SLURM, **anywhere}).rank == 2


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("gpu[008-011]-ib,login", ["gpu008-ib", "gpu009-ib", "gpu010-ib", "gpu011-ib", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a,b", ["a", "b"]),
        ("", []),
    ],
)
def test_lists_of_machines(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_a_list_of_machines_that_is_none() -> None:
    with pytest.raises(TopologyError, match=r"'n\[a-b\]' has 'a-b' where a number"):
        expand_hosts("n[a-b]")


@pytest.mark.parametrize("launcher", ["Open MPI", "Intel MPI", "MVAPICH", "Slurm"])
def test_ranks_meet_under_each_launcher(ranks: Callable[..., list[Any]], launcher: str) -> None:
    names = {
        "Open MPI": ["OMPI_COMM_WORLD_" + end for end in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")],
        "Intel MPI": ["PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"],
        "MVAPICH": ["MV2_COMM_WORLD_" + end for end in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")],
        "Slurm": ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE"],
    }[launcher]

    def body() -> Any:
        import os

        import torch

        from accel_state import PartialState, gather

        values = [os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
        os.environ.update(zip(names, values, strict=True))
        state = PartialState(cpu=True)
        assert state.local_process_index == state.process_index
        return gather(torch.tensor([state.process_index])).tolist()

    assert ranks(body, 2) == [[0, 1], [0, 1]]
