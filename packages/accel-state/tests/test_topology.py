"""Reading the launchers' variables: every complete set, and every way to be incomplete or contradictory."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.errors import TopologyError
from accel_state.topology import Topology

# What torchrun 2.13 sets for the second of two processes on the second of two machines.
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29501",
}


def test_without_variables_it_is_one_process():
    topology = Topology.from_env({})
    assert topology == Topology(0, 1, 0, 1, 0, 1, None, None)
    assert not topology.is_distributed


@pytest.mark.parametrize("variables", [{"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {"LOCAL_RANK": "-1"}, {"RANK": ""}])
def test_variables_that_start_nothing(variables):
    assert Topology.from_env(variables) == Topology()


def test_torchrun():
    topology = Topology.from_env(TORCHRUN)
    assert topology == Topology(3, 4, 1, 2, 1, 2, "node0", 29501)
    assert topology.is_distributed


def test_the_only_process_of_a_launcher_is_distributed():
    assert Topology.from_env(
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    ).is_distributed


def test_what_follows_from_the_rest_may_be_left_out():
    on_one_machine = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "2"}
    assert Topology.from_env(on_one_machine) == Topology(1, 2, 1, 2, 0, 1, "h", 2)
    without_groups = {name: text for name, text in TORCHRUN.items() if not name.startswith("GROUP")}
    assert Topology.from_env(without_groups) == Topology.from_env(TORCHRUN)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named_with_one_that_is_there(missing):
    with pytest.raises(TopologyError, match=rf"=\d.* but {missing} is not set"):
        Topology.from_env({name: text for name, text in TORCHRUN.items() if name != missing})


def test_several_machines_without_a_local_size():
    variables = {name: text for name, text in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    with pytest.raises(TopologyError, match=r"RANK=3 and LOCAL_RANK=1 differ.*LOCAL_WORLD_SIZE"):
        Topology.from_env(variables)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "4"}, "RANK=4 contradicts WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "RANK=3 contradicts WORLD_SIZE=0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 contradicts WORLD_SIZE=4"),
        ({"RANK": "0"}, "LOCAL_RANK=1 contradicts RANK=0"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK=2 contradicts GROUP_WORLD_SIZE=2"),
        ({"RANK": "three"}, "RANK='three' is not a number"),
        ({"RANK": "-2"}, "RANK='-2' is not a number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
    ],
)
def test_contradictions_name_both(change, words):
    with pytest.raises(TopologyError, match=words):
        Topology.from_env({**TORCHRUN, **change})


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 1},
        {"rank": -1, "world_size": 2},
        {"world_size": 0},
        {"world_size": 2},
        {"local_rank": 1},
        {"node_rank": 1},
        {"local_world_size": 2},
        {"master_address": "h"},
        {"master_port": 1},
    ],
)
def test_an_impossible_place_is_refused(fields):
    with pytest.raises(TopologyError):
        Topology(**fields)


@given(nodes=st.integers(1, 5), per_node=st.integers(1, 8), data=st.data())
def test_every_rank_of_a_regular_job(nodes, per_node, data):
    rank = data.draw(st.integers(0, nodes * per_node - 1))
    environ = {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * per_node),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    topology = Topology.from_env(environ)
    assert (topology.node_rank, topology.num_nodes) == (rank // per_node, nodes)
    assert topology.node_rank * per_node + topology.local_rank == topology.rank
    assert pickle.loads(pickle.dumps(topology)) == topology


def test_it_is_frozen():
    with pytest.raises(AttributeError):
        Topology().rank = 1


def test_neither_torch_nor_inspect_is_imported():
    code = """
import sys
import accel_state.topology, accel_state.settings, accel_state.device_count
accel_state.settings.all_settings()
accel_state.device_count.count_devices()
print([name for name in ("torch", "inspect", "dataclasses") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
