"""``python -m kombu_toc.http``: serves a timeout center over HTTP."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys

from ..client.urls import mask_password
from ..errors import TocError
from ..version import __version__
from .app import KEEP_ANSWERS, OPERATIONS, api_for
from .openapi import document
from .operations import ROLES, Router
from .serving import PORT, serve
from .tokens import TOKENS, new_token, tokens_of

#: The environment variable with the broker, whose URL may have a password.
BROKER = "TOC_HTTP_BROKER"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every server."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="0 for a free one (%(default)s)")
    parser.add_argument(
        "--tokens",
        metavar="FILE",
        help=f"who may do what; or the same lines in the environment variable {TOKENS}",
    )
    parser.add_argument(
        "--anonymous-read",
        action="store_true",
        help="let who has no token look at everything",
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        help="a name of this server, by which who has no token may look; may be repeated",
    )
    parser.add_argument(
        "--keep-answers",
        type=_seconds,
        default=KEEP_ANSWERS,
        metavar="SECONDS",
        help="for which answers are kept under an Idempotency-Key (%(default)g)",
    )
    parser.add_argument("--certificate", metavar="FILE", help="for TLS")
    parser.add_argument("--key", metavar="FILE", help="of the certificate")


def _seconds(text: str) -> float:
    """Seconds, from one to a year. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 31_536_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to 31536000 seconds")
    return seconds


def main(arguments: list[str] | None = None) -> int:
    """Serve a center, or write what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m kombu_toc.http",
        description="Put, lease, find, move and cancel messages over HTTP: docs/http.md.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--broker",
        metavar="URL",
        default=os.environ.get(BROKER),
        help=f"as toc+redis://localhost:6379/0; or the environment variable {BROKER}, which no "
        "list of processes shows",
    )
    add_options(parser)
    parser.add_argument("--new-token", metavar="NAME", help="make a token and print its line")
    parser.add_argument("--roles", default="read,write", help=f"of it: {', '.join(ROLES)}")
    parser.add_argument("--queues", default="*", help="of it: names or patterns, as mail,sms-*")
    parser.add_argument("--openapi", action="store_true", help="print the OpenAPI document")
    asked = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    try:
        if asked.openapi:
            print(json.dumps(document(Router(OPERATIONS)), indent=1))
            return 0
        if asked.new_token is not None:
            secret, line = new_token(asked.new_token, asked.roles, asked.queues)
            print(f"{line}", flush=True)
            print(f"The token, which is shown this once: {secret}", file=sys.stderr)
            return 0
        if not asked.broker:
            parser.error(f"name the broker: --broker toc+redis://localhost:6379/0, or {BROKER}")
        api = api_for(
            asked.broker,
            tokens=tokens_of(asked.tokens, asked.anonymous_read),
            names=asked.name,
            keep_answers=asked.keep_answers,
        )
        serve(
            api,
            asked.host,
            asked.port,
            certificate=asked.certificate,
            key=asked.key,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except (TocError, OSError) as exc:
        broker = asked.broker or ""
        shown = str(exc).replace(broker, mask_password(broker)) if broker else str(exc)
        print(f"{parser.prog}: {shown}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
