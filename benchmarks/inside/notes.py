"""When tasks started: a file per process, in a folder apart from every broker.

One write of 16 bytes to a file in memory costs about a microsecond, needs no server, and is
seen by others at once. Standard library only: this runs in every peer's environment.
"""

from __future__ import annotations

import os
import struct
import time

#: number, seconds since the epoch
ENTRY = struct.Struct("=qd")

_file: tuple[int, int] | None = None


def note(number: int) -> None:
    """Write down that the task of that number starts now."""
    global _file
    now = time.time()
    pid = os.getpid()
    if _file is None or _file[0] != pid:  # a forked child has a file of its own
        path = os.path.join(os.environ["BENCH_NOTES"], f"{pid}.starts")
        _file = (pid, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    os.write(_file[1], ENTRY.pack(number, now))


def count(directory: str) -> int:
    """How many starts there are."""
    total = 0
    for entry in os.scandir(directory):
        if entry.name.endswith(".starts"):
            # Not the size that scandir may know from before.
            total += os.stat(entry.path).st_size // ENTRY.size
    return total


def read(directory: str) -> list[tuple[int, float, int]]:
    """(number, time, process) of each start, in order of time."""
    found = []
    for entry in os.scandir(directory):
        if entry.name.endswith(".starts"):
            with open(entry.path, "rb") as file:
                data = file.read()
            pid = int(entry.name.partition(".")[0])
            whole = len(data) // ENTRY.size * ENTRY.size
            found += [(n, at, pid) for n, at in ENTRY.iter_unpack(data[:whole])]
    return sorted(found, key=lambda start: start[1])
