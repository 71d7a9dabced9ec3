"""A revoke is heard of before it is broadcast.

Touches: ``Control.mailbox`` and ``Mailbox._broadcast``, which are replaced on the classes.

Why: there are five public ways to revoke a task (``AsyncResult.revoke``, ``GroupResult.revoke``,
``app.control.revoke``, ``revoke_by_stamped_headers``, ``celery control revoke``), Flower's beside.
All of them meet in the broadcast, and no signal is sent for one. A mailbox does not know its app.

Read in Celery 5.3.6 and 5.7.0, and Kombu 5.3.7 and 5.7.0.

Without: a revoke is Celery's own. Workers remember the id and discard the task when it comes; the
message waits in Redis until then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kombu_toc import CompatPart

PART = CompatPart(
    "revoke-removes",
    touches="Celery's Control.mailbox, Kombu's Mailbox._broadcast",
    lost="a revoked task waits in Redis until a worker discards it",
    check=lambda mailbox: CompatPart.missing(mailbox, "_broadcast"),
)

#: app, the mailbox's connection, command, arguments, whether a reply is wanted, and what tells the
#: workers of the command with these arguments or others
Handler = Callable[[Any, Any, str, Any, bool, Callable[[Any], Any]], Any]


def install(handle: Handler) -> None:
    """Have every app's broadcasts go through `handle`, but for those that name workers."""
    from celery.app.control import Control
    from kombu.pidbox import Mailbox

    if not PART.usable(Mailbox):
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
