"""Every private name of Celery, Kombu, billiard and Flower that this package touches or replaces.

One file a subject. Its docstring says of each part what it touches, why no public way exists, in
which versions that was read, and what is lost without it. Each part is a `kombu_toc.CompatPart`,
which is checked on start and can be switched off: ``TOC_COMPAT_OFF=quick-times,send-now``.
docs/compat.md lists them.

Nothing here imports a worker's modules before a worker needs them: a web process that only sends
tasks loads these files too, and so knows every part's name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kombu_toc import ConfigurationError

from . import control, sending, worker

__all__ = ("control", "refusing", "sending", "worker")

logger = logging.getLogger(__name__)


@contextmanager
def refusing() -> Iterator[None]:
    """End a worker that starts, with one line, if it would lose tasks or execute them twice.

    It would if a module or a name of Celery's is not there. Raises SystemExit, which also leaves
    a signal handler of Celery's.
    """
    try:
        yield
    except (ConfigurationError, ImportError) as exc:
        logger.critical("This worker does not start: %s", exc)
        raise SystemExit(1) from exc
