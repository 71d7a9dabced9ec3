"""How people steer and inspect workers: revokes, remote control, the command line, Flower.

A revoke is heard of before it is broadcast (`revoke-removes`).

Touches: ``Control.mailbox`` and ``Mailbox._broadcast``, which are replaced on the classes.

Why: there are five public ways to revoke a task (``AsyncResult.revoke``, ``GroupResult.revoke``,
``app.control.revoke``, ``revoke_by_stamped_headers``, ``celery control revoke``), Flower's beside.
All of them meet in the broadcast, and no signal is sent for one. A mailbox does not know its app.

Read in Celery 5.3.6 and 5.7.0, and Kombu 5.3.7 and 5.7.0.

Without: a revoke is Celery's own. Workers remember the id and discard the task when it comes; the
message waits in Redis until then.

Remote control neither holds a worker nor ends while a server is away (`remote-control`).

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

``celery inspect scheduled`` and ``revoked`` tell of the center what they tell of a worker
(`inspect`).

Touches: ``celery.worker.control.scheduled`` and ``revoked``, whose answers are added to.

Why: a command is registered by its name, and the one that is registered last answers; Celery's own
can only be called by the name that its module gives it.

Read in Celery 5.3.6 and 5.7.0.

Without: the two commands tell what the worker itself holds: none of what waits in the center.

`command-line`: Celery's command line knows the commands of remote control that are added here.

Touches: ``celery.bin.control.inspect`` and ``control``, of whose click parameters the choices are
made anew, and ``Panel.meta``, where Celery keeps what commands there are.

Why: Celery before 5.4 makes the list of choices when the module is imported, before a command of
somebody's own can be registered.

Read in Celery 5.3.6 and 5.7.0.

Without: ``celery inspect toc``, ``celery control toc_pause`` and ``toc_resume`` are refused by
Celery's command line before 5.4. ``app.control`` sends them all the same.

The databases of the task library are not shown among an app's settings (`hidden-settings`).

Touches: ``celery.app.utils.HIDDEN_SETTINGS``.

Why: ``celery report``, ``celery inspect report`` and ``celery inspect conf`` show all settings, but
for those whose names match this expression. The URL of a database is in
``broker_transport_options``, and may have a password.

Read in Celery 5.3.6, 5.5.3 and 5.7.0.

Without: these commands show ``toc_library`` as it was set. ``env:NAME`` shows no password.

Flower's Broker page shows the queues of a timeout center (`flower`).

Touches: ``flower.utils.broker.Broker.__new__``, which is replaced on the class.

Why: Flower decides by the broker URL's scheme whom it asks for the queues, out of a list which
nothing can be added to. Any other scheme gets an error page.

Read in Flower 2.0.1.

Without: Flower's Broker page shows an error. Its other pages are not concerned.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from kombu import serialization

from kombu_toc import CompatPart

# -- revoke-removes

REVOKE_REMOVES = CompatPart(
    "revoke-removes",
    lost="a revoked task waits in Redis until a worker discards it",
    check=lambda mailbox: CompatPart.missing(mailbox, "_broadcast"),
)

#: app, the mailbox's connection, command, arguments, whether a reply is wanted, and what tells the
#: workers of the command with these arguments or others
Handler = Callable[[Any, Any, str, Any, bool, Callable[[Any], Any]], Any]


def install_revoke_removes(handle: Handler) -> None:
    """Have every app's broadcasts go through `handle`, but for those that name workers."""
    from celery.app.control import Control
    from kombu.pidbox import Mailbox

    if not REVOKE_REMOVES.usable(Mailbox):
        return
    # On the classes, because a process may use its control before it asks for a transport: it
    # then looks up both of these once it has a connection.
    Control.mailbox = property(_mailbox, _set_mailbox)
    broadcast: Callable[..., Any] = Mailbox._broadcast

    @wraps(broadcast)
    def _broadcast(
        self: Any,
        command: str,
        arguments: Any = None,
        destination: Any = None,
        reply: bool = False,
        *args: Any,
        **options: Any,
    ) -> Any:
        def tell(arguments: Any) -> Any:
            return broadcast(self, command, arguments, destination, reply, *args, **options)

        app = getattr(self, "revoking_app", None)
        if app is None or destination or options.get("pattern"):
            return tell(arguments)
        return handle(app, self.connection, command, arguments, bool(reply), tell)

    Mailbox._broadcast = _broadcast  # type: ignore[method-assign]  # that is the hook


def _mailbox(control: Any) -> Any:
    try:
        mailbox = vars(control)["mailbox"]
    except KeyError:
        raise AttributeError("mailbox") from None
    # Copied along when it is bound to a connection.
    mailbox.revoking_app = control.app
    return mailbox


def _set_mailbox(control: Any, mailbox: Any) -> None:
    vars(control)["mailbox"] = mailbox


# -- remote-control

logger = logging.getLogger(__name__)

REMOTE_CONTROL = CompatPart(
    "remote-control",
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


def install_remote_control(consumer: Any) -> None:
    """Have remote control neither hold a worker nor end. To be called when the worker's steps are
    made, and none has started."""
    from celery.worker.consumer.control import Control

    box = getattr(consumer.blueprint.steps.get(Control.name), "box", None)
    if box is None or not REMOTE_CONTROL.usable(box):
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


# -- inspect

INSPECT = CompatPart(
    "inspect",
    lost="`inspect scheduled`, `query_task` and `revoked` do not tell what waits in the center",
    check=lambda control: CompatPart.missing(control, "scheduled", "query_task", "revoked"),
)


def inspect_commands() -> Any:
    """The module with the commands that are to be replaced: Celery's own, each of which takes the
    worker's state, and arguments by name. None if they stay."""
    from celery.worker import control

    return control if INSPECT.usable(control) else None


# -- command-line

COMMAND_LINE = CompatPart(
    "command-line",
    lost="Celery's command line may not know `inspect toc`",
    check=lambda control, panel: [
        *CompatPart.missing(control, "inspect", "control"),
        *CompatPart.missing(panel, "meta"),
        *(CompatPart.missing(control.inspect, "params") if hasattr(control, "inspect") else ()),
    ],
)


def add_commands() -> None:
    """Make the commands known to Celery's command line, which is loaded."""
    import click
    from celery.bin import control
    from celery.worker.control import Panel

    if not COMMAND_LINE.usable(control, Panel):
        return
    for command, kind in ((control.inspect, "inspect"), (control.control, "control")):
        names = [name for name, info in Panel.meta.items() if info.type == kind and info.visible]
        for parameter in command.params:
            if isinstance(parameter.type, click.Choice):
                parameter.type = click.Choice(names)


# -- hidden-settings

#: What matches the option, and not those whose names it begins.
_OPTION = r"\bTOC_LIBRARY$"

SETTINGS_HIDDEN = CompatPart(
    "hidden-settings",
    lost="`celery report` and `celery inspect conf` show the URLs of toc_library with passwords",
    check=lambda utils: (
        []
        if isinstance(getattr(utils, "HIDDEN_SETTINGS", None), re.Pattern)
        else ["celery.app.utils.HIDDEN_SETTINGS"]
    ),
)


def install_hidden_settings() -> None:
    """Have Celery hide the option."""
    from celery.app import utils

    if SETTINGS_HIDDEN.usable(utils) and _OPTION not in utils.HIDDEN_SETTINGS.pattern:
        shown = utils.HIDDEN_SETTINGS
        utils.HIDDEN_SETTINGS = re.compile(f"{shown.pattern}|{_OPTION}", shown.flags)


# -- flower

FLOWER = CompatPart(
    "flower",
    lost="Flower's Broker page shows an error",
    check=lambda broker: [] if "__new__" in vars(broker) else ["Broker.__new__"],
)


def install_flower(ours: Callable[..., Any]) -> None:
    """Let Flower find what `ours` makes for a broker URL of ours; it gets Flower's arguments."""
    from flower.utils.broker import Broker

    if not FLOWER.usable(Broker):
        return
    choose = Broker.__new__

    def choose_or_ours(cls: type, broker_url: str, *args: Any, **kwargs: Any) -> Any:
        if broker_url.partition("://")[0].partition("+")[0] == "toc":
            return ours(broker_url, **kwargs)
        return choose(cls, broker_url, *args, **kwargs)

    Broker.__new__ = staticmethod(choose_or_ours)
