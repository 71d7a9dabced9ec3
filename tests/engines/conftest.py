"""The fixtures of tests of the task library."""

from ..support.library import (  # noqa: F401 - pytest finds them here
    away,
    broker,
    engine,
    library_url,
    new_url,
    options,
    recorded,
    store,
)
