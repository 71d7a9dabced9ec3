"""A center whose puts, pops and settlements have spans of OpenTelemetry.

It stands before the parts of a center that has ``toc_otel``; any other center has its parts alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from ..client.options import Address, Settings
from ..errors import ActionTimeError, EnvelopeError, ReceiptError
from ..model import message as envelope
from ..model.delivery import read_receipt
from ..model.results import Delivery, Popped, Put, Settled
from ..scripts.call import microseconds
from ..tracing import Tracing, tracing_of
from .center import TimeoutCenter
from .consumption import Loops
from .pop import Deliveries, Given
from .put import Given as NewMany
from .put import Puts

_FIELDS = ("id", "body", "at", "delay")

#: Bytes of a body in which the context of a trace is looked for.
MOST = 1 << 20


def trace_center(center: TimeoutCenter, settings: Settings, address: Address) -> None:
    """Have a span for what is done by a center. Raises ConfigurationError without OpenTelemetry's
    API."""
    tracing = tracing_of(settings, address)
    center.puts = cast(Puts, TracedPuts(center.puts, tracing))
    center.deliveries = deliveries = cast(Deliveries, TracedDeliveries(center.deliveries, tracing))
    center.loops = Loops(center.core, deliveries)


def headers_of(body: bytes, id: str) -> Mapping[str, Any]:
    """The headers of a message that is kept as an envelope, or the attributes of a CloudEvent;
    nothing of other bytes."""
    if len(body) > MOST or body[:1] not in (b"{", b"\x01", b"\x02"):
        return {}
    try:
        if body[:1] != b"{" or body[:5] == b'{"h":':
            headers: Mapping[str, Any] = envelope.unpack(body, id, MOST)["headers"]
            return headers
        if b'"specversion"' in body:
            event = json.loads(body)
            return event if isinstance(event, dict) else {}
    except (EnvelopeError, ValueError, RecursionError):
        pass  # it only looks like one
    return {}


class _Traced:
    """A part of a center, in whose place this stands."""

    def __init__(self, part: Any, tracing: Tracing) -> None:
        self.__dict__.update(_part=part, _tracing=tracing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._part, name, value)


class TracedPuts(_Traced):
    """Puts messages, in spans."""

    _part: Puts
    _tracing: Tracing

    def put(
        self,
        topic: str,
        id: str,
        body: bytes,
        *,
        at: float | None = None,
        delay: float | None = None,
        **how: Any,
    ) -> Put:
        """As :meth:`.put.Puts.put`."""
        headers = headers_of(body, id) if isinstance(body, bytes) else {}
        with self._tracing.sending(topic, id, headers, _due_us(at, delay)):
            return self._part.put(topic, id, body, at=at, delay=delay, **how)

    def put_many(
        self, topic: str, messages: Iterable[NewMany], *, token: str | None = None
    ) -> list[Put]:
        """As :meth:`.put.Puts.put_many`."""
        some = list(messages)
        if not some:
            return self._part.put_many(topic, some, token=token)
        made = [_read(one) for one in some]
        soonest = min((_due_us(at, delay) or 0 for _, _, at, delay in made), default=0)
        headers = (headers_of(body, id) for id, body, _, _ in made if isinstance(body, bytes))
        with self._tracing.putting(topic, headers, len(some), soonest or None):
            return self._part.put_many(topic, some, token=token)


class TracedDeliveries(_Traced):
    """Delivers messages and ends their deliveries, in spans."""

    _part: Deliveries
    _tracing: Tracing

    def pop(self, topic: str | Iterable[str], limit: int | None = None, **how: Any) -> Popped:
        """As :meth:`.pop.Deliveries.pop`. What finds nothing has no span."""
        began = time.time_ns()
        popped = self._part.pop(topic, limit, **how)
        if popped.messages:
            if how.get("wait", 0) != 0:
                began = time.time_ns()  # to wait is no work
            self._tracing.pulled(
                [(one, headers_of(one.body, one.id)) for one in popped.messages],
                popped.now_us,
                began,
            )
        return popped

    def ack(self, messages: Given) -> Settled:
        """As :meth:`.pop.Deliveries.ack`."""
        return self._settled("ack", self._part.ack, messages)

    def release(self, messages: Given) -> Settled:
        """As :meth:`.pop.Deliveries.release`."""
        return self._settled("release", self._part.release, messages)

    def _settled(
        self, operation: str, settle: Callable[[list[Any]], Settled], messages: Given
    ) -> Settled:
        # One, or several, that are gone through more than once.
        given = [messages] if isinstance(messages, (Delivery, str, bytes)) else list(messages)
        if not given:
            return settle(given)
        with self._settling(operation, given) as count:
            settled = settle(given)
            count(settled)
        return settled

    def reject(
        self, message: Delivery | str, *, requeue: bool, reason: str = "", **how: Any
    ) -> str | None:
        """As :meth:`.pop.Deliveries.reject`."""
        with self._settling("requeue" if requeue else "reject", [message], reason) as count:
            state = self._part.reject(message, requeue=requeue, reason=reason, **how)
            count(state is not None)
        return state

    def bury(self, message: Delivery, *, reason: str, **how: Any) -> str | None:
        """As :meth:`.pop.Deliveries.bury`."""
        with self._settling("bury", [message], reason) as count:
            kept = self._part.bury(message, reason=reason, **how)
            count(kept is not None)
        return kept

    def _settling(self, operation: str, given: list[Any], reason: str = "") -> Any:
        found = []
        for one in given:
            if isinstance(one, Delivery):
                found.append((one.topic, one.id, headers_of(one.body, one.id)))
            elif isinstance(one, str):
                try:
                    fields = read_receipt(one)
                except ReceiptError:  # the center says so
                    continue
                found.append((fields[0], fields[3], {}))
        return self._tracing.settling(operation, found, reason)


def _read(message: NewMany) -> tuple[Any, Any, Any, Any]:
    """Id, body, action time and delay of one of many; what is wrong with it, the center says."""
    if isinstance(message, Mapping):
        return tuple(map(message.get, _FIELDS))  # type: ignore[return-value]
    return (*message[:4], None, None, None, None)[:4] if isinstance(message, tuple) else (None,) * 4


def _due_us(at: float | None, delay: float | None) -> int | None:
    """When a message is due, in microseconds since the epoch; None: now."""
    try:
        after_us, at_us = microseconds(delay), microseconds(at)
    except (ActionTimeError, TypeError):  # it is no time: the center says so
        return None
    return at_us if after_us is None else time.time_ns() // 1000 + after_us
