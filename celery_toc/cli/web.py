"""``celery toc web``: the HTTP API of the app's broker."""

from __future__ import annotations

import json
import os
from typing import Any

import click

import kombu_toc

from .session import FAILED, Failure, Session, command

# -- celery toc web


@command("""
celery -A shop toc web
celery -A shop toc web --allow 'shop.*'
celery -A shop toc web --host 0.0.0.0 --port 8088 --tokens tokens.txt
""")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8088, show_default=True, help="0: a free one."
)
@click.option(
    "--allow",
    "-t",
    multiple=True,
    metavar="NAME",
    help="A task that may be sent, or a pattern; may be repeated. None unless given.",
)
@click.option(
    "--tokens",
    type=click.Path(exists=True, dir_okay=False),
    help="Who may do what, one a line; or the environment variable TOC_HTTP_TOKENS.",
)
@click.option("--anonymous-read", is_flag=True, help="Let who has no token look at everything.")
@click.option(
    "--name",
    "names",
    multiple=True,
    help="A name of this server, by which who has no token may look; may be repeated.",
)
@click.option(
    "--keep-answers",
    type=click.FloatRange(1, 31_536_000),
    default=3600.0,
    show_default=True,
    help="Seconds for which answers are kept under an Idempotency-Key.",
)
@click.option(
    "--notify",
    metavar="FILE",
    help="Also send what is due to the targets of queues, signed by the secrets in this file.",
)
@click.option(
    "--notify-allow",
    multiple=True,
    metavar="NETWORK",
    help="That these may be sent to although they are not public; may be repeated.",
)
@click.option(
    "--mask",
    multiple=True,
    metavar="NAME",
    help="An argument that is hidden on the page, and from tokens that may not write; or a "
    "pattern; may be repeated. * for all.",
)
@click.option(
    "--connections",
    type=click.IntRange(1),
    default=2000,
    show_default=True,
    help="Connections that may be open at a time; further ones are answered 503.",
)
@click.option("--certificate", type=click.Path(exists=True, dir_okay=False), help="For TLS.")
@click.option("--key", type=click.Path(exists=True, dir_okay=False), help="Of the certificate.")
@click.option("--openapi", is_flag=True, help="Print the OpenAPI document, and serve nothing.")
def web(
    session: Session,
    host: str,
    port: int,
    tokens: str | None,
    anonymous_read: bool,
    notify: str | None,
    notify_allow: tuple[str, ...],
    openapi: bool,
    **more: Any,
) -> None:
    """Serve the page and the HTTP API until Ctrl-C: messages, tasks, queues, schedules, metrics.

    Without tokens it listens on this machine's loopback only. `python -m kombu_toc.http
    --new-token NAME` makes a token.
    """
    from kombu_toc.http import Tokens, check_needs, serve, tokens_of

    from ..web import api_for_app

    check_needs(with_notifier=notify is not None)
    known: Tokens = tokens_of(tokens, anonymous_read)
    beside = []
    if notify is not None:
        from kombu_toc.notify import beside as notifier_beside

        try:
            beside.append(notifier_beside(notify, allow=notify_allow))
        except OSError as exc:
            raise Failure(f"the secrets cannot be read: {exc}", FAILED) from exc
    api: Any = api_for_app(
        session.app,
        tokens=known,
        beside=beside,
        **{name: more.pop(name) for name in ("allow", "names", "keep_answers", "mask")},
    )
    if openapi:
        click.echo(json.dumps(api.document, indent=1))
        return
    try:
        serve(api, host, port, say=lambda text: click.echo(text, err=True), **more)
    except OSError as exc:
        shown = os.strerror(exc.errno) if exc.errno else exc
        raise Failure(f"cannot serve at {host}:{port}: {shown}", FAILED) from exc


# -- celery toc notify


@command("""
celery -A shop toc topic set mail --target https://shop.example.com/hook
python -m kombu_toc.notify --new-secret https://shop.example.com >secrets.txt
celery -A shop toc notify --secrets secrets.txt
""")
@click.option(
    "--secrets",
    type=click.Path(dir_okay=False),
    help="The secrets of targets; or the environment variable TOC_NOTIFY_SECRETS.",
)
@click.option("--unsigned", is_flag=True, help="Sign nothing.")
@click.option(
    "--allow",
    multiple=True,
    metavar="NETWORK",
    help="What may be sent to although it is not public, as 10.1.0.0/16; may be repeated.",
)
@click.option("--timeout", type=float, default=15.0, show_default=True, help="Seconds.")
@click.option(
    "--concurrency",
    type=int,
    default=100,
    show_default=True,
    help="Requests under way of one queue.",
)
@click.option(
    "--backoff",
    type=float,
    default=5.0,
    show_default=True,
    help="Seconds that a message waits after its first failure, if its queue does not say.",
)
def notify(session: Session, **options: Any) -> None:
    """Send what is due of queues with a target there, by HTTP, until Ctrl-C.

    Any number of these share the work. `celery toc topic set QUEUE --target URL` gives a queue a
    target.
    """
    from kombu_toc.notify import check_needs
    from kombu_toc.notify import notify as send_until_told

    check_needs()
    from ..app.broker import broker_of

    broker = broker_of(session.app)
    try:
        send_until_told(
            lambda: kombu_toc.AsyncTimeoutCenter.from_url(
                broker.url, ssl=broker.ssl, **broker.options
            ),
            **options,
            say=lambda text: click.echo(text, err=True),
        )
    except kombu_toc.ServerError:
        raise  # an OSError, too, and not of the secrets
    except OSError as exc:
        raise Failure(f"the secrets cannot be read: {exc}", FAILED) from exc
