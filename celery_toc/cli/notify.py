"""``celery toc notify``: sends messages to the targets of their queues."""

from __future__ import annotations

import click

import kombu_toc

from .exits import FAILED, Command, Failure
from .session import Session, with_session


@click.command(
    cls=Command,
    example="""
celery -A shop toc topic set mail --target https://shop.example.com/hook
python -m kombu_toc.notify --new-secret https://shop.example.com >secrets.txt
celery -A shop toc notify --secrets secrets.txt
""",
)
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
@with_session
def notify(
    session: Session,
    secrets: str | None,
    unsigned: bool,
    allow: tuple[str, ...],
    timeout: float,
    concurrency: int,
    backoff: float,
) -> None:
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
            secrets=secrets,
            unsigned=unsigned,
            allow=allow,
            timeout=timeout,
            concurrency=concurrency,
            backoff=backoff,
            say=lambda text: click.echo(text, err=True),
        )
    except kombu_toc.ServerError:
        raise  # an OSError, too, and not of the secrets
    except OSError as exc:
        raise Failure(f"the secrets cannot be read: {exc}", FAILED) from exc
