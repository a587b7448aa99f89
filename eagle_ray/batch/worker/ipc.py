"""Channel: messages with optional tables, between two processes of one machine.

A message is pickled; a table is in Arrow's stream format. Each takes one system call of any size, so a thread that
waits in one leaves the GIL to the others.

    here, there = Channel.pair()
    here.send("how many rows?", table)
    message, table = there.receive()
"""

from __future__ import annotations

import pickle
import socket
import struct
from contextlib import suppress
from typing import Any

import pyarrow as pa

LENGTHS = struct.Struct("<QQ")  # in bytes, of the message and of its table; 0 where it has none


class Channel:
    """One of two ends. One thread may send while another receives."""

    def __init__(self, end: socket.socket):
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        here, there = socket.socketpair()
        return cls(here), cls(there)

    @classmethod
    def inherited(cls, fileno: int) -> Channel:
        """Return the end that the parent process left open under this number. Child processes do not inherit it."""
        end = socket.socket(fileno=fileno)
        end.set_inheritable(False)
        return cls(end)

    @property
    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, table: pa.Table | None = None) -> None:
        """Send and return once the system has all of it. Raises EOFError if the other end is gone."""
        said, rows = pickle.dumps(message), b"" if table is None else _as_bytes(table)
        try:
            self._socket.sendall(LENGTHS.pack(len(said), len(rows)) + said)
            self._socket.sendall(rows)
        except OSError as error:
            raise EOFError from error

    def receive(self) -> tuple[Any, pa.Table | None]:
        """Return the next message and its table. Raises EOFError once the other end is gone."""
        said, rows = LENGTHS.unpack(self._read(LENGTHS.size))
        message = pickle.loads(self._read(said))
        return message, _as_table(self._read(rows)) if rows else None

    def end(self) -> None:
        """Shut down both ends, also for a thread that waits in one of them."""
        with suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end in this process only."""
        self._socket.close()

    def _read(self, size: int) -> pa.Buffer:
        buffer = pa.allocate_buffer(size)
        left = memoryview(buffer)
        while left:
            try:
                count = self._socket.recv_into(left, len(left), socket.MSG_WAITALL)
            except OSError as error:
                raise EOFError from error
            if not count:
                raise EOFError
            left = left[count:]
        return buffer


def _as_bytes(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _as_table(buffer: pa.Buffer) -> pa.Table:
    """Return the buffer as a table without copying."""
    return pa.ipc.open_stream(buffer).read_all()
