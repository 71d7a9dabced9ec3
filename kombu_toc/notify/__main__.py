"""``python -m kombu_toc.notify``: sends messages to the targets of their queues."""

from __future__ import annotations

from typing import Any

import click

from ..aio.center import AsyncTimeoutCenter
from ..client.programs import named, program, say
from . import message
from .notifier import check_needs, notifier_options, notify

#: The environment variable with the broker, whose URL may have a password.
BROKER = "TOC_NOTIFY_BROKER"


@program("python -m kombu_toc.notify", BROKER)
@notifier_options
@click.option(
    "--new-secret", metavar="TARGET", help="Make a secret, and print its line for that target."
)
def main(broker: str | None, new_secret: str | None, **options: Any) -> None:
    """Send what is due of queues that have a target there: docs/notifier.md."""
    if new_secret is not None:
        line = f"{new_secret} {message.new_secret()}"
        message.Secrets([line], "--new-secret")  # a target that makes no sense is refused here
        click.echo(line)
        return
    url = named(broker, BROKER)
    check_needs()
    notify(lambda: AsyncTimeoutCenter.from_url(url), **options, say=say)


if __name__ == "__main__":
    main()
