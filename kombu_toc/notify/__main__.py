"""``python -m kombu_toc.notify``: sends messages to the targets of their queues."""

from __future__ import annotations

import argparse
import sys

from ..aio.center import AsyncTimeoutCenter
from ..client.programs import Program, say
from .message import SECRETS, Secrets, new_secret
from .notifier import BACKOFF, CONCURRENCY, TIMEOUT, check_needs, notify

#: The environment variable with the broker, whose URL may have a password.
BROKER = "TOC_NOTIFY_BROKER"


def main(arguments: list[str] | None = None) -> int:
    """Send messages, or make a secret."""
    parser = Program(
        "python -m kombu_toc.notify",
        "Send what is due of queues that have a target there: docs/notifier.md.",
        BROKER,
    )
    parser.add_argument(
        "--secrets",
        metavar="FILE",
        help=f"the secrets of targets; or the same lines in the environment variable {SECRETS}",
    )
    parser.add_argument("--unsigned", action="store_true", help="sign nothing")
    parser.add_repeated(
        "--allow",
        "NETWORK",
        "an address or a network that may be sent to although it is not public, as 10.1.0.0/16 or, "
        "at one port, 10.1.0.7:8080",
    )
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, help="seconds for a request (%(default)g)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=CONCURRENCY,
        help="requests under way of one queue (%(default)s)",
    )
    parser.add_argument(
        "--backoff",
        type=float,
        default=BACKOFF,
        help="seconds that a message waits after its first failure, if its queue does not say "
        "(%(default)g)",
    )
    parser.add_argument(
        "--new-secret", metavar="TARGET", help="make a secret, and print its line for that target"
    )

    def do(asked: argparse.Namespace) -> None:
        if asked.new_secret is not None:
            line = f"{asked.new_secret} {new_secret()}"
            Secrets([line], "--new-secret")  # a target that makes no sense is refused here
            print(line, flush=True)
            return
        broker = parser.broker_of(asked)
        check_needs()
        notify(
            lambda: AsyncTimeoutCenter.from_url(broker),
            secrets=asked.secrets,
            unsigned=asked.unsigned,
            allow=asked.allow,
            timeout=asked.timeout,
            concurrency=asked.concurrency,
            backoff=asked.backoff,
            say=say,
        )

    return parser.run(arguments, do)


if __name__ == "__main__":
    sys.exit(main())
