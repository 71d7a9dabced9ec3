"""A delivered message, as Kombu's consumers get it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from kombu import message as kombu_message

from ..center.exchanges import Subscription
from ..model.results import Delivery

#: Delivery tags, unique within the process: one may be settled on a channel that is closed.
tags = count(1)


class Message(kombu_message.Message):
    """A delivered message.

    delivery: what the center knows of it; None for a broadcast
    """

    #: whether it goes to DeadQueue if it is acknowledged while what it is for runs, and the process
    #: that runs it is lost
    dies_if_lost = False

    #: whether that is so now, and the task library is to be told when the task has ended
    dies_later = False

    #: whether the task itself asks to be put back into its queue
    asks_requeue = False

    #: whether it was lost or failed: to be requeued costs it a retry then
    is_lost = False

    #: what the task library is told when it is acknowledged: how its task has ended, if its
    #: consumer knows that
    outcome = "done"

    #: what a traced channel knows of the span that received it
    trace: Any = None

    def __init__(
        self,
        channel: Any,
        content: dict[str, Any],
        delivery: Delivery | None,
        subscription: Subscription | None = None,
    ) -> None:
        properties = content["properties"]
        info = properties.setdefault("delivery_info", {})
        tag = properties["delivery_tag"] = next(tags)
        headers = content["headers"]
        if delivery is not None and delivery.redelivered:
            info["redelivered"] = headers["redelivered"] = True
            if delivery.failures:
                headers["x-delivery-count"] = delivery.failures
        self.delivery = delivery
        self.subscription = subscription
        super().__init__(  # type: ignore[no-untyped-call]  # Kombu's
            body=content["body"],
            channel=channel,
            delivery_tag=tag,
            content_type=content["content-type"],
            content_encoding=content["content-encoding"],
            headers=headers,
            properties=properties,
            delivery_info=info,
        )
        #: why it is rejected, and what went wrong: kept with it
        self.reason = self.error = ""
        #: it was given back unhandled: whoever still has it must not handle it
        self.given_back = False
        #: it was delivered, and its time has not come yet: whoever has it says by
        #: :meth:`call_when_due` what is to be done then
        self.is_early = False
        #: what is to be done when it is due
        self.on_due: Callable[[], Any] | None = None
        #: what is to be done if it is given back instead
        self.on_given_back: Callable[[], Any] | None = None
        #: to be delivered again, a broadcast needs what it came as
        self.origin: tuple[str, bytes] | None = None

    def call_when_due(
        self, function: Callable[[], Any], otherwise: Callable[[], Any] | None = None
    ) -> None:
        """Call `function` at the message's action time; at once if that has come.

        otherwise: is called instead if the message is given back before
        """
        if self.is_early:
            self.on_due, self.on_given_back = function, otherwise
        else:
            function()

    def reject_log_error(self, logger: Any, errors: Any, requeue: bool = False) -> None:
        """Reject it as Celery does, whatever has become of its task: a requeue costs a retry,
        unless :attr:`asks_requeue`. (:meth:`requeue` and ``reject(requeue=True)``, by which a
        consumer of a program's own says "not now", cost none.)"""
        self.is_lost = not self.asks_requeue
        super().reject_log_error(logger, errors, requeue)  # type: ignore[no-untyped-call]

    def requeue_lost(self) -> None:
        """Requeue it, for who had it is gone: that costs a retry."""
        self.is_lost = True
        self.requeue()  # type: ignore[no-untyped-call]

    def note_release(self) -> None:
        """Note that the message is given back unhandled: nothing begins."""
        self.given_back = True
        self.on_due = None
        on_given_back, self.on_given_back = self.on_given_back, None
        if on_given_back is not None:
            on_given_back()

    def bury(self, reason: str, error: str = "") -> None:
        """Put it into DeadQueue although it was acknowledged: what it was for has failed. A
        broadcast has none."""
        if self.delivery is not None:
            self.channel.poller.bury(self.delivery, reason, error)
            if self.channel.recorder is not None:
                self.channel.note_dead(self, error)
            if self.trace is not None:
                self.channel.trace_burial(self, reason)

    def note_outcome(self) -> None:
        """Its task has ended with an :attr:`outcome`, after it was acknowledged."""
        if self.channel.recorder is not None:
            self.channel.note_outcome(self)

    def return_broadcast(self) -> None:
        """A broadcast is to be delivered again."""
        if self.subscription is not None:
            self.subscription.returned.append(self.origin)

    @property
    def waited(self) -> bool:
        """Whether the center has held it back until its ``eta``."""
        # Celery's protocol 1 has the eta in the body, which nobody looks into here.
        return self.delivery is not None and self.headers.get("eta") is not None
