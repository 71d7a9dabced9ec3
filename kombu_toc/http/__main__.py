"""``python -m kombu_toc.http``: serves a timeout center over HTTP."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import click

from ..client.programs import named, program, say
from . import tokens
from .app import OPERATIONS, api_for, document
from .request import ROLES, Router
from .serving import serve_as_told, server_options

#: The environment variable with the broker, whose URL may have a password.
BROKER = "TOC_HTTP_BROKER"


@program("python -m kombu_toc.http", BROKER)
@server_options("A member of messages")
@click.option("--new-token", metavar="NAME", help="Make a token and print its line.")
@click.option(
    "--roles", default="read,write", show_default=True, help=f"Of it: {', '.join(ROLES)}."
)
@click.option(
    "--queues", default="*", show_default=True, help="Of it: names or patterns, as mail,sms-*."
)
@click.option("--openapi", is_flag=True, help="Print the OpenAPI document.")
def main(
    broker: str | None,
    new_token: str | None,
    roles: str,
    queues: str,
    openapi: bool,
    mask: tuple[str, ...],
    **options: Any,
) -> None:
    """Put, lease, find, move and cancel messages over HTTP: docs/http.md."""
    if openapi:
        click.echo(json.dumps(document(Router(OPERATIONS)), indent=1))
    elif new_token is not None:
        secret, line = tokens.new_token(new_token, roles, queues)
        click.echo(line)
        say(f"The token, which is shown this once: {secret}")
    else:
        make = partial(api_for, named(broker, BROKER), mask=tokens.Mask(mask))
        serve_as_told(make, **options, say=say)


if __name__ == "__main__":
    main()
