"""Methods of :class:`TimeoutCenter` by the names that they had before the center had parts.

They are kept for programs that use them. The project itself uses the parts: `commands`, `leases`
and `registry`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..model.keys import Keys
from ..model.results import Delivery
from ..model.topic import Declaration, Topic
from ..scripts.call import Countdown, ScriptCall
from .commands import Commands, add_counters, announce_presence
from .deliveries import Deliveries
from .leases import Leases
from .registry import Registry
from .requests import ADD, REMEMBER, PopRequest, PutRequest


class OldNames:
    """The old names; see the methods that they call."""

    keys: Keys
    commands: Commands
    deliveries: Deliveries
    leases: Leases
    registry: Registry

    def declaring(self, name: str, wanted: Declaration) -> ScriptCall:
        """As :meth:`.registry.Registry.declare_call`."""
        return self.registry.declare_call(name, wanted)

    def putting(
        self,
        topic: Topic,
        id: str,
        body: bytes,
        *,
        at_us: int | Countdown | None = None,
        delay_us: int | None = None,
        basis: str | None = None,
        priority: int = 0,
        token: str | None = None,
        if_exists: str = ADD,
        publish: tuple[str, str] | None = None,
        remember: int = REMEMBER,
        replaces: bool = False,
    ) -> ScriptCall:
        """As :meth:`.commands.Commands.put`."""
        request = PutRequest(
            id,
            body,
            at_us,
            delay_us,
            basis,
            priority,
            token,
            if_exists,
            publish,
            remember,
            replaces,
        )
        return self.commands.put(topic, request)

    def popping(
        self,
        topic: Topic,
        slots: Iterable[int] | None = None,
        *,
        soon: int,
        lookahead_us: int = 0,
        late: int = 0,
        behind_us: int = 0,
        visibility: float | None = None,
        recover: int = 0,
        claimed: bool = True,
        name: str | None = None,
        remember: int = 0,
    ) -> ScriptCall:
        """As :meth:`.commands.Commands.pop`. name: made up unless given."""
        request = PopRequest(
            name or self.deliveries.names.next(),
            slots,
            soon,
            lookahead_us,
            late,
            behind_us,
            visibility,
            recover,
            claimed,
            remember,
        )
        return self.commands.pop(topic, request)

    def recalling(
        self,
        topic: Topic,
        slots: Iterable[int] | None,
        name: str,
        *,
        visibility: float | None = None,
        bodies: bool = True,
        remember: int = REMEMBER,
    ) -> ScriptCall:
        """As :meth:`.commands.Commands.recall`."""
        return self.commands.recall(
            topic, slots, name, visibility=visibility, bodies=bodies, remember=remember
        )

    def finding_due(self, topics: Sequence[str]) -> ScriptCall:
        """As :meth:`.commands.Commands.find_due`."""
        return self.commands.find_due(topics)

    def acking(self, deliveries: Iterable[Delivery]) -> list[ScriptCall]:
        """As :meth:`.commands.Commands.ack`."""
        return self.commands.ack(deliveries)

    def rejecting(
        self,
        delivery: Delivery,
        *,
        requeue: bool,
        reason: str = "",
        error: str = "",
        backoff: float | None = None,
    ) -> ScriptCall:
        """As :meth:`.commands.Commands.reject`."""
        return self.commands.reject(
            delivery, requeue=requeue, reason=reason, error=error, backoff=backoff
        )

    def releasing(self, deliveries: Iterable[Delivery]) -> list[ScriptCall]:
        """As :meth:`.commands.Commands.release`."""
        return self.commands.release(deliveries)

    def extending(
        self, deliveries: Iterable[Delivery], visibility: float | None = None
    ) -> list[ScriptCall]:
        """As :meth:`.commands.Commands.extend`."""
        return self.commands.extend(deliveries, visibility)

    def handing_back(self, topic: str, claims: Iterable[tuple[int, int]]) -> list[ScriptCall]:
        """As :meth:`.commands.Commands.reannounce`."""
        return self.commands.reannounce(self.registry.resolved(topic), claims)

    def appearing(self, said: str, before: Iterable[str], ttl_ms: int) -> ScriptCall:
        """As :func:`.commands.announce_presence`."""
        return announce_presence(self.keys, said, before, ttl_ms)

    def counting(self, topic: str | None, added: dict[str, int]) -> ScriptCall:
        """As :func:`.commands.add_counters`."""
        return add_counters(self.keys, topic, added)
