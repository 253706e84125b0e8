"""A port that is ours until rank 0 listens on it."""

import socket

import pytest

from accel_launch.spawn.port import Port
from accel_state.errors import LaunchError


@pytest.fixture
def port():
    held = Port("127.0.0.1", None)
    yield held
    held.close()


def test_the_store_of_rank_0_may_listen_and_others_may_not(port):
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port.number))
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", port.number))
        store.listen()


def test_two_launches_never_hold_the_same(port):
    with pytest.raises(LaunchError, match=f"--main-process-port {port.number} is in use"):
        Port("127.0.0.1", port.number)
    others = [Port("127.0.0.1", None) for _ in range(50)]
    assert len({port.number, *(other.number for other in others)}) == 51
    for other in others:
        other.close()


def test_it_is_free_again_afterwards():
    first = Port("127.0.0.1", None)
    first.close()
    Port("127.0.0.1", first.number).close()


def test_an_address_of_another_machine():
    with pytest.raises(LaunchError, match=r"--main-process-ip 192\.0\.2\.1 is not an address of this machine"):
        Port("192.0.2.1", None)
