"""Runs a notifier until the process is told to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..aio.center import AsyncTimeoutCenter
from ..client.urls import raise_file_limit
from .notifier import Notifier
from .signing import SecretsFile


def notify(
    open_center: Callable[[], AsyncTimeoutCenter],
    *,
    secrets: str | Path | None = None,
    unsigned: bool = False,
    say: Callable[[str], None] = print,
    **options: Any,
) -> None:
    """Send what is due until SIGINT or SIGTERM; what is under way then ends first.

    open_center: makes the center, in the event loop
    secrets: a file with the secrets of targets; None: the environment variable TOC_NOTIFY_SECRETS
    unsigned: sign nothing instead
    say: is told that it has begun
    options: those of :class:`.notifier.Notifier`

    Raises ConfigurationError for what makes no sense, OSError if the secrets cannot be read.
    """
    kept = None if unsigned else SecretsFile(secrets)
    raise_file_limit()

    async def run() -> None:
        async with open_center() as center:
            notifier = Notifier(center, kept, **options)
            until = asyncio.Event()
            loop = asyncio.get_running_loop()
            for one in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(one, _end, loop, until)
            if unsigned:
                say("Nothing is signed: a target cannot tell who has sent what it gets.")
            say("Sending what is due of queues that have a target.")
            await notifier.run(until)

    asyncio.run(run())


def _end(loop: asyncio.AbstractEventLoop, until: asyncio.Event) -> None:
    """The first signal ends it in order; the next one at once."""
    until.set()
    for one in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(one)


def beside(
    secrets: str | Path | None, **options: Any
) -> Callable[[AsyncTimeoutCenter], Callable[[asyncio.Event], Any]]:
    """A notifier inside a server of the HTTP API: for the argument ``beside`` of
    :func:`kombu_toc.http.api_for`.

    secrets, options: as those of :func:`notify`

    Raises OSError if the secrets cannot be read; the application raises ConfigurationError for what
    makes no sense.
    """
    kept = SecretsFile(secrets)
    return lambda center: Notifier(center, kept, **options).run
