"""Remote control neither holds a worker nor ends while a server is away.

Touches: of `Control.box`, the worker's `Pidbox`, `Node.reply` and, with gevent and eventlet,
`gPidbox.loop`, which are replaced on the objects; and `gPidbox._node_shutdown`.

Why: Kombu's mailbox publishes an answer through the app's pool of producers, and repeats it without
an end. It does so in the worker's loop, which starts no task meanwhile: also on a Cluster, where
only the node with the reply queue may be away. The greenlet that hears remote control ends with its
connection's first error. The worker's own connection may have had none, and then nobody starts the
greenlet again.

Read in Celery 5.3.6 and 5.7.0, Kombu 5.3.7 and 5.7.0.

Without: an answer may hold a worker for as long as a node of a Cluster is away, and a worker of
greenlets may not answer until it is started again.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from kombu import serialization

from kombu_toc import CompatPart

logger = logging.getLogger(__name__)

PART = CompatPart(
    "remote-control",
    touches="Celery's Control.box, gPidbox.loop and _node_shutdown, Kombu's Node.reply",
    lost="an answer to remote control may hold a worker while a node of a Cluster is away, and "
    "workers of greenlets may not answer after a failover",
    check=lambda box: [
        *CompatPart.missing(box, "node"),
        *CompatPart.missing(getattr(box, "node", None), "reply", "mailbox", "channel"),
        *(CompatPart.missing(box, "loop", "_node_shutdown") if hasattr(box, "loop") else ()),
    ],
)

#: Kombu's and AMQP's number for a message that need not outlive the server.
_TRANSIENT = 1

#: Seconds between two attempts of a greenlet to hear remote control again; and what lasts so long
#: was a connection that could be used.
PAUSE = 1.0
LASTED = 10.0


def install(consumer: Any) -> None:
    """See the module. To be called when the worker's steps are made, and none has started."""
    from celery.worker.consumer.control import Control

    box = getattr(consumer.blueprint.steps.get(Control.name), "box", None)
    if box is None or not PART.usable(box):
        return
    box.node.reply = _answering(box.node, consumer)
    if hasattr(box, "loop"):
        box.loop = _lasting(box, consumer)


def _answering(node: Any, consumer: Any) -> Any:
    failures = consumer.connection_errors + consumer.channel_errors

    def reply(data: Any, exchange: str, routing_key: str, ticket: Any, **_: Any) -> None:
        mailbox = node.mailbox
        content_type, encoding, body = serialization.dumps(data, serializer=mailbox.serializer)
        message = node.channel.prepare_message(
            body,
            content_type=content_type,
            content_encoding=encoding,
            headers={"ticket": ticket, "clock": mailbox.clock.forward()},
            properties={"delivery_mode": _TRANSIENT},
        )
        try:
            node.channel.answer(message, exchange, routing_key)
        except failures as exc:
            logger.warning("An answer to remote control is not sent: %s", exc)

    return reply


def _lasting(box: Any, consumer: Any) -> Any:
    failures = consumer.connection_errors + consumer.channel_errors
    loop = box.loop

    def loop_again(c: Any) -> None:
        lasted = True
        while True:
            began = time.monotonic()
            try:
                loop(c)
                return
            except failures as exc:
                lasted = lasted or time.monotonic() - began > LASTED
                level = logging.WARNING if lasted else logging.DEBUG
                logger.log(
                    level, "Remote control has lost its connection and connects again: %s", exc
                )
                lasted = False
            shutdown = box._node_shutdown
            time.sleep(PAUSE)
            # The worker may have stopped it meanwhile, and started it once more.
            if shutdown is None or shutdown is not box._node_shutdown or not c.connection:
                return

    return loop_again
