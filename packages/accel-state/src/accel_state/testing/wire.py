"""What the test process and the forking process say to each other: length-prefixed JSON over a socket."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message, or None when the other side is gone.

    Raises:
        TimeoutError: nothing came within the connection's time-out.
    """
    head = _read(connection, _LENGTH.size)
    if head is None:
        return None
    data = _read(connection, _LENGTH.unpack(head)[0])
    return None if data is None else json.loads(data)


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return data
