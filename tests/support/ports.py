"""Ports for servers: no two processes that ask here are given the same one."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TextIO

#: What a node of a cluster listens on besides its port is its port plus this.
BUS = 10000

#: Below what the system gives to clients, so that a killed server finds its port free again;
#: their bus ports follow above.
FIRST, LAST = 11000, 21000

#: A process has so many for itself, and takes them in turn.
BLOCK = 250


def free_port() -> int:
    """A TCP port that nobody listens on, nor on its bus port, and that this process's other
    servers, and those of other processes that ask here, will not have."""
    ports = _ports(os.getpid())
    for port in itertools.islice(ports, BLOCK):
        if _is_free(port) and _is_free(port + BUS):
            return port
    raise AssertionError(f"none of this process's {BLOCK} ports is free")


@cache
def _ports(_: int) -> Iterator[int]:
    """The ports of this process, over and over."""
    for first in range(FIRST, LAST, BLOCK):
        lock = _locked(Path(tempfile.gettempdir()) / f"celery-toc-ports-{os.getuid()}-{first}")
        if lock is not None:
            return _in_turn(first, lock)
    raise AssertionError("other processes have all ports for servers")


def _in_turn(first: int, lock: TextIO) -> Iterator[int]:
    with lock:  # until the process ends
        yield from itertools.cycle(range(first, first + BLOCK))


def _locked(path: Path) -> TextIO | None:
    """The file, locked by this process, unless another one has it."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As a server does: what lingers of a connection that has ended is not in its way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
