"""Opens the library that a connection's options name. Imports nothing of SQLAlchemy's before."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..center.center import TimeoutCenter, make_center
from ..client.connect import connect
from ..client.options import Address, DatabaseURL, Settings, read, read_url
from ..client.programs import check_installed
from ..errors import ConfigurationError

if TYPE_CHECKING:
    from .center import OpenLibrary
    from .recorder import Recorder

#: The file beside the data of the embedded server.
FILE = "library.db"

_lock = threading.Lock()


def check_needs() -> None:
    """Raises ConfigurationError, naming the extra, if what a task library needs is missing."""
    check_installed("toc_library", "library", "sqlalchemy", "alembic")


def databases(settings: Settings, address: Address) -> tuple[DatabaseURL, ...]:
    """The databases of a connection's library. Raises ConfigurationError."""
    found = settings.toc_library
    if any(one.is_beside for one in found):
        if address.kind != "embedded" or not address.path:
            raise ConfigurationError(
                "toc_library=on keeps the library beside the embedded server's data, as in "
                "toc+embedded:///path/to/dir?toc_library=on; elsewhere name a database"
            )
        os.makedirs(address.path, exist_ok=True)
        return (DatabaseURL(f"sqlite:///{os.path.join(address.path, FILE)}"),)
    return found


#: What this process has opened: the databases and the server -> the recorder
_opened: dict[Any, Recorder] = {}


def _after_fork() -> None:
    """In a child: it goes on with what it has inherited, over connections of its own. A center that
    its parent has made has them, too."""
    global _lock
    _lock = threading.Lock()  # one of the parent's threads may have held it
    for recorder in _opened.values():
        recorder.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def attach(
    center: TimeoutCenter,
    settings: Settings,
    address: Address,
    another: Callable[[], TimeoutCenter],
) -> OpenLibrary | None:
    """Open the library that the settings name, if they do, and have the center use it.

    another: makes a center with connections of its own
    """
    if not settings.toc_library:
        return None
    check_needs()
    from . import migrate
    from . import recorder as recording
    from .center import OpenLibrary
    from .horizon import FarMessages, FarStore
    from .library import Library
    from .retry import FailedRows
    from .shards import Layout, Shards
    from .store import Store

    urls = databases(settings, address)
    server = (address.kind, address.host, address.port, address.path, address.db, address.hosts)
    how = (settings.toc_library_tables, settings.toc_library_required, settings.prefix)
    before = (settings.toc_library_before, settings.toc_library_tables_before)
    key = (urls, *how, *before, *server)
    with _lock:
        if key not in _opened:
            former = Layout(*before) if before[0] else None
            timeout = settings.toc_library_timeout
            shards = Shards(urls, settings.toc_library_tables, timeout, former)
            for database in shards.databases:
                database.prepare = partial(migrate.prepare, shards)
            _opened[key] = recording.Recorder(
                *(Store(shards), another),
                required=settings.toc_library_required,
                retention=settings.toc_library_retention,
                patience=settings.toc_library_timeout,
                count=partial(center.metrics.count, counter="unrecorded"),
            )
        made = _opened[key]
    library = Library(made.store, center, another)
    far = FarMessages(FarStore(made.store), center)
    failures = FailedRows(made.store, bool(settings.toc_failures_mask))
    opened = OpenLibrary(made, library, far, failures, center)
    center.recorder = opened
    return opened


def center_for(url: str, *, ssl: Any = None, **options: Any) -> TimeoutCenter:
    """The timeout center behind a broker URL.

    ssl: as in Celery's ``broker_use_ssl``
    options: as in ``broker_transport_options``

    Raises ConfigurationError for a URL or an option that makes no sense. It connects when it is
    first used.
    """
    return open_center(url, ssl, options, attach)


def open_center(
    url: str, ssl: Any, options: dict[str, Any], attach: Callable[..., Any], **how: Any
) -> TimeoutCenter:
    """The center of :func:`center_for`.

    attach: gives it its library: as :func:`attach`
    how: arguments of :func:`.connect` for its own client; its library's is one that waits
    """
    address = read_url(url)
    settings = read(address.query, options, of_center=True)

    def make(**how: Any) -> TimeoutCenter:
        return make_center(connect(address, settings, ssl=ssl, **how), settings)

    center = make(**how)
    attach(center, settings, address, make)
    if settings.toc_otel:
        from ..center.traced import trace_center  # it needs an extra

        trace_center(center, settings, address)
    return center
