"""Topics at run time: what one is declared with, and how that is changed while it is in use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ConfigurationError, SlotCountError, UnknownTopicError
from ..model.library import check_horizon
from ..model.limits import (
    LIBRARY_TERMS,
    LIMITS,
    NEEDS,
    NOTIFIER_TERMS,
    PRIORITY_STEPS,
    TERMS,
    Limits,
    check_gates,
    check_steps,
)
from ..model.results import DECLARED, DEFAULT, Description, Limit
from ..model.topic import Declaration, Topic
from .context import Context
from .operations import Operations
from .registry import Registry
from .statistics import Statistics

#: Priority steps that consumers read, at most: a lease has room for the number of one.
MAX_STEPS = 30

#: The limits that can be changed while a topic is in use, by name.
ALTERABLE = (*(name for name in LIMITS if name not in ("slots", "expires")), "steps")


class Topics:
    """Describes topics, and alters their declarations."""

    def __init__(
        self, registry: Registry, context: Context, operations: Operations, statistics: Statistics
    ) -> None:
        self._registry = registry
        self._context = context
        self._operations = operations
        self._statistics = statistics

    def alter(self, /, topic: str, **limits: Any) -> Topic:
        """Change limits of a declared topic while it is in use; return it as it is declared then.

        limits: those of :meth:`declare`, but for ``slots`` and ``expires``; None takes one back to
            the default of whoever uses the topic (``retries`` and ``steps``: of this center); of
            those for starts, keys and puts, None takes one away

        Consumers and producers know within five seconds. Several may alter a topic at the same
        time: what each has named holds, and nothing else changes. What a message has already, it
        keeps: the lease of one that is in flight, the retries that one has left that was tried.

        Messages under a step that is removed are delivered like the others: consumers go on
        reading it, and nothing is put there any more. While steps are added, a message that is in
        flight or dead may come back under a neighbouring one.

        Raises UnknownTopicError if nobody has declared the topic, ConfigurationError for a limit
        that makes no sense or cannot be altered, or does not go with the others; with a task
        library, LibraryError if that cannot be told: it is altered all the same.
        """
        wanted = self._checked(topic, limits)
        self._registry.check_horizon(topic, limits)
        while True:
            found = self.require(topic)
            changed = self._changed(found, wanted)
            # If not, somebody else has changed it meanwhile, and this begins anew.
            if self._registry.redeclare(found, changed):
                altered = self._registry.declared(topic) or replace(found, declaration=changed)
                if self._operations.recorder is not None:
                    self._operations.recorder.altered(found, altered)
                return altered

    def describe(self, topic: str) -> Description:
        """What a topic is declared with, where each limit comes from, and what is in it.

        Raises UnknownTopicError if nobody has declared it.
        """
        found = self.require(topic)
        standing = found.declaration
        in_force = standing.limits(self._context.limits)
        said = {name: getattr(standing, name) for name in ("retries", *Limits._fields)}
        limits = {
            name: Limit(getattr(in_force, name), DEFAULT)
            if value is None
            else Limit(value, DECLARED)
            for name, value in said.items()
        }
        for name in (*TERMS, *LIBRARY_TERMS, *NOTIFIER_TERMS):
            value = getattr(standing, name)
            limits[name] = Limit(value, DEFAULT if value is None else DECLARED)
        if standing.key_weights:
            limits["key_weights"] = Limit(dict(standing.key_weights), DECLARED)
        steps = Limit(found.open_steps, DEFAULT if standing.steps is None else DECLARED)
        return Description(
            topic,
            found.slots,
            {**limits, "steps": steps},
            standing.closed_steps,
            standing.expires,
            standing.draining_counts,
            self._operations.is_paused(topic),
            self._statistics.counts(topic),
            self._statistics.consumers().get(topic, []),
            standing.target_stopped,
        )

    def require(self, topic: str) -> Topic:
        """The topic as it is declared now. Raises UnknownTopicError if nobody has declared it."""
        found = self._registry.declared(topic)
        if found is None:
            raise UnknownTopicError(f"there is no queue {topic!r}")
        return found

    @staticmethod
    def _checked(topic: str, limits: dict[str, Any]) -> dict[str, Any]:
        """The limits as they are stored; None stays None."""
        if "slots" in limits:
            raise SlotCountError(
                f"queue {topic!r}: the slot count is changed by another command: "
                f"'celery toc reshard {topic} --slots {limits['slots']}'"
            )
        if "expires" in limits:
            raise ConfigurationError(
                f"queue {topic!r}: whether it expires, and when, is settled when it is declared; "
                f"delete it, and declare it anew"
            )
        unknown = set(limits) - set(ALTERABLE)
        if unknown:
            raise ConfigurationError(
                f"queue {topic!r}: unknown limit {min(unknown)!r}; there are {', '.join(ALTERABLE)}"
            )
        checked = Declaration.of(topic, **limits)
        return {
            name: None if value is None else getattr(checked, name)
            for name, value in limits.items()
        }

    def _changed(self, topic: Topic, wanted: dict[str, Any]) -> Declaration:
        fields = dict(wanted)
        if "retries" in fields and fields["retries"] is None:
            fields["retries"] = self._registry.retries
        if "steps" in fields:
            fields.update(self._steps(topic, fields["steps"] or self._registry.steps))
        for name, needed in NEEDS.items():  # what says nothing any more goes with the other
            if needed in fields and not fields[needed]:
                fields.setdefault(name, None)
        if "target" in fields:  # whoever names one wants something sent there
            fields["target_stopped"] = None
        changed = replace(topic.declaration, **fields).with_lanes()
        if not fields.keys().isdisjoint(LIBRARY_TERMS):
            check_horizon(topic.name, changed)
        if not fields.keys().isdisjoint(TERMS):
            check_gates(topic.name, changed, clustered=self._context.clustered)
        return changed

    @staticmethod
    def _steps(topic: Topic, wanted: tuple[int, ...] | None) -> dict[str, Any]:
        """The fields of a declaration with these steps. Those that it has had stay among those
        that consumers read: messages may be there, and a producer that does not know yet may put
        one there."""
        steps = check_steps(wanted or PRIORITY_STEPS)
        before = topic.declaration.steps or {*topic.steps, *PRIORITY_STEPS}
        every = tuple(sorted({*before, *steps}))
        if len(every) > MAX_STEPS:
            raise ConfigurationError(
                f"queue {topic.name!r} has had {len(before)} priority steps, and with these there "
                f"would be more than {MAX_STEPS}: use some that it has had, or let it run empty "
                "and delete it"
            )
        closed = tuple(step for step in every if step not in steps)
        return {"steps": every, "closed_steps": closed, "altered": True}
