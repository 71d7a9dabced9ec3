"""``celery toc web``: the HTTP API of the app's broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

import kombu_toc
from kombu_toc.http import serve_as_told, server_options
from kombu_toc.notify import check_needs, notifier_options
from kombu_toc.notify import notify as send_until_told

from .session import Failure, Session, command, flag, option

# -- celery toc web


@command
@server_options("An argument")
@option(
    "--allow -t",
    "NAME",
    "A task that may be sent, or a pattern; may be repeated. None unless given.",
    multiple=True,
)
@flag("--openapi", "Print the OpenAPI document, and serve nothing.")
def web(
    session: Session, allow: tuple[str, ...], mask: tuple[str, ...], openapi: bool, **options: Any
) -> None:
    """Serve the page and the HTTP API until Ctrl-C: messages, tasks, queues, schedules, metrics.

    Without tokens it listens on this machine's loopback only. `python -m kombu_toc.http
    --new-token NAME` makes a token.

    Examples:
    celery -A shop toc web
    celery -A shop toc web --allow 'shop.*'
    celery -A shop toc web --host 0.0.0.0 --port 8088 --tokens tokens.txt
    """
    from ..web import api_for_app, load_tasks

    load_tasks(session.app)
    make = partial(api_for_app, session.app, allow=allow, mask=mask)
    if openapi:
        click.echo(json.dumps(make().document, indent=1))
        return
    with _own_errors():
        serve_as_told(make, **options, say=_say)


# -- celery toc notify


@command
@notifier_options
def notify(session: Session, **options: Any) -> None:
    """Send what is due of queues with a target there, by HTTP, until Ctrl-C.

    Any number of these share the work. `celery toc topic set QUEUE --target URL` gives a queue a
    target.

    Examples:
    celery -A shop toc topic set mail --target https://shop.example.com/hook
    python -m kombu_toc.notify --new-secret https://shop.example.com >secrets.txt
    celery -A shop toc notify --secrets secrets.txt
    """
    from ..app.task import broker_of

    check_needs()
    broker = broker_of(session.app)
    with _own_errors():
        send_until_told(
            lambda: kombu_toc.AsyncTimeoutCenter.from_url(
                broker.url, ssl=broker.ssl, **broker.options
            ),
            **options,
            say=_say,
        )


def _say(text: str) -> None:
    click.echo(text, err=True)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Show an error of a file or an address as it is. Others are of the broker."""
    try:
        yield
    except kombu_toc.ServerError:  # an OSError, too
        raise
    except OSError as exc:
        raise Failure(exc) from exc
