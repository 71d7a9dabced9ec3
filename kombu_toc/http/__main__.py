"""``python -m kombu_toc.http``: serves a timeout center over HTTP."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from ..client.programs import Program, say
from .app import KEEP_ANSWERS, OPERATIONS, Beside, api_for, document
from .page import Mask
from .request import ROLES, Router
from .serving import CONNECTIONS, PORT, check_needs, serve
from .tokens import TOKENS, new_token, tokens_of

#: The environment variable with the broker, whose URL may have a password.
BROKER = "TOC_HTTP_BROKER"


def add_options(parser: Program) -> None:
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
    parser.add_repeated(
        "--name", "NAME", "a name of this server, by which who has no token may look"
    )
    parser.add_argument(
        "--keep-answers",
        type=_seconds,
        default=KEEP_ANSWERS,
        metavar="SECONDS",
        help="for which answers are kept under an Idempotency-Key (%(default)g)",
    )
    parser.add_argument(
        "--notify",
        metavar="FILE",
        help="also send what is due to the targets of queues, signed by the secrets in this file",
    )
    parser.add_repeated(
        "--notify-allow", "NETWORK", "that these may be sent to although they are not public"
    )
    parser.add_repeated(
        "--mask",
        "NAME",
        "a member of messages that is hidden on the page, and from tokens that may not write; or a "
        "pattern, '*' for all of every message",
    )
    parser.add_argument(
        "--connections",
        type=_connections,
        default=CONNECTIONS,
        metavar="NUMBER",
        help="that may be open at a time; further ones are answered 503 (%(default)d)",
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


def _connections(text: str) -> int:
    """How many connections there may be. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _beside(asked: argparse.Namespace) -> Iterator[Beside]:
    """What runs beside the server."""
    if asked.notify is not None:
        from ..notify import beside

        yield beside(asked.notify, allow=asked.notify_allow)


def main(arguments: list[str] | None = None) -> int:
    """Serve a center, or write what is asked for."""
    parser = Program(
        "python -m kombu_toc.http",
        "Put, lease, find, move and cancel messages over HTTP: docs/http.md.",
        BROKER,
    )
    add_options(parser)
    parser.add_argument("--new-token", metavar="NAME", help="make a token and print its line")
    parser.add_argument("--roles", default="read,write", help=f"of it: {', '.join(ROLES)}")
    parser.add_argument("--queues", default="*", help="of it: names or patterns, as mail,sms-*")
    parser.add_argument("--openapi", action="store_true", help="print the OpenAPI document")

    def do(asked: argparse.Namespace) -> None:
        if asked.openapi:
            print(json.dumps(document(Router(OPERATIONS)), indent=1))
            return
        if asked.new_token is not None:
            secret, line = new_token(asked.new_token, asked.roles, asked.queues)
            print(f"{line}", flush=True)
            print(f"The token, which is shown this once: {secret}", file=sys.stderr)
            return
        check_needs(with_notifier=asked.notify is not None)
        api = api_for(
            parser.broker_of(asked),
            tokens=tokens_of(asked.tokens, asked.anonymous_read),
            names=asked.name,
            keep_answers=asked.keep_answers,
            beside=_beside(asked),
            mask=Mask(asked.mask),
        )
        serve(
            api,
            asked.host,
            asked.port,
            certificate=asked.certificate,
            key=asked.key,
            connections=asked.connections,
            say=say,
        )

    return parser.run(arguments, do)


if __name__ == "__main__":
    sys.exit(main())
