"""The TCP port that the ranks meet at: ours until rank 0 listens on it."""

from __future__ import annotations

import errno
import socket
import sys

from accel_state.errors import LaunchError


class Port:
    """A port that no other program is given, and that rank 0 can listen on.

    It is bound here but not listened on. The kernel then hands it to nobody who asks for any port, and refuses it to
    programs that do not share (`SO_REUSEADDR`), while the store of rank 0, which does, may listen. Two launches that
    ask for the same port by number are told apart by a name that Linux forgets with the process that holds it.

    Args:
        address: of this machine, where the ranks meet.
        number: the port; None for any free one.

    Raises:
        LaunchError: the port is in use, or the address is not one of this machine.
    """

    def __init__(self, address: str, number: int | None) -> None:
        self._name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = socket.socket()
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(address, number or 0, type=socket.SOCK_STREAM)[0]
            self._socket.close()
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(place)
            self.number: int = self._socket.getsockname()[1]
            if sys.platform == "linux":
                self._name.bind(f"\0accel-launch-port-{self.number}")
        except OSError as error:
            self.close()
            raise LaunchError(_explain(error, address, number)) from None

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()
        self._name.close()


def _explain(error: OSError, address: str, number: int | None) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"--main-process-port {number} is in use on this machine: leave the flag out to get a free one, "
            "or end the program that listens there"
        )
    if error.errno == errno.EACCES:
        return f"--main-process-port {number} is reserved for the system: use one from 1024 to 65535"
    return f"--main-process-ip {address} is not an address of this machine ({error}): leave it out on one machine"
