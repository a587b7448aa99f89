"""List the network sockets on which processes accept connections or datagrams, from /proc.

>>> listeners({os.getpid()})
{Listener(pid=4711, protocol='tcp', address='127.0.0.1', port=8000)}
"""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

TABLES = ("tcp", "tcp6", "udp", "udp6")
ACCEPTING = {"tcp": "0A", "udp": "07"}  # TCP_LISTEN; a UDP socket without a peer


@dataclass(frozen=True, slots=True)
class Listener:
    pid: int
    protocol: str  # tcp or udp
    address: str  # an IPv4 address where IPv6 maps one
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.protocol} {host}:{self.port}"


def listeners_of_this_process() -> set[Listener]:
    """Return this process's listeners; none on systems without /proc."""
    return listeners({os.getpid()}) if Path("/proc/self/net/tcp").exists() else set()


def listeners(pids: Collection[int]) -> set[Listener]:
    """Return the listeners of processes of this network namespace. Processes that have ended have none."""
    owners = {inode: pid for pid in pids for inode in _sockets_of(pid)}
    found = set()
    for table in TABLES:
        protocol = table[:3]
        for local, state, inode in _rows_of(table):
            if state == ACCEPTING[protocol] and inode in owners:
                address, _, port = local.partition(":")
                found.add(Listener(owners[inode], protocol, _address_of(address), int(port, 16)))
    return found


def _sockets_of(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    directory = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(directory)
    except OSError:  # the process has ended
        return
    for number in numbers:
        try:
            target = os.readlink(f"{directory}/{number}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _rows_of(table: str) -> Iterator[tuple[str, str, str]]:
    """Yield local address, state and inode of each socket in a table of /proc/net."""
    file = Path(f"/proc/self/net/{table}")
    if not file.exists():  # a machine without IPv6
        return
    for line in file.read_text().splitlines()[1:]:
        columns = line.split()
        yield columns[1], columns[3], columns[9]


def _address_of(text: str) -> str:
    """Return the address that the kernel shows as hexadecimal words in the machine's byte order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(packed) == 4:
        return str(ipaddress.IPv4Address(packed))
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)
