"""What the parts of one center share: keys, limits, who runs calls, and who keeps a record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..scripts.call import ScriptCall, load, parts_of, text
from .admin_commands import AdminCommands
from .calls import Commands, Context
from .recording import Far, Recorder
from .registry import Registry
from .runner import Runner


@dataclass(eq=False)
class Core:
    """What the parts of one center share.

    recorder: who keeps a record of what is done, if anybody does
    """

    runner: Runner
    registry: Registry
    context: Context
    commands: Commands
    admin: AdminCommands
    recorder: Recorder | None = None


class CenterPart:
    """A part of a center: methods that build calls, and run them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._runner, self._registry, self._context = core.runner, core.registry, core.context
        self._commands, self._admin = core.commands, core.admin

    @property
    def far(self) -> Far | None:
        """What is too far ahead to be in Redis, if there is a task library."""
        recorder = self._core.recorder
        return None if recorder is None else recorder.far

    def _far_of(self, topic: str | None) -> Far | None:
        """The same, if a topic may have such messages; None: any topic."""
        return self.far if self._registry.far(topic) else None


# -- what the processes of one server and prefix tell each other

#: Ids that one call remembers as cancelled.
REMEMBERED_PER_CALL = 500

#: Ids that one call reads.
READ_PER_CALL = 5000


class SharedNotes(CenterPart):
    """Notes in Redis that every process may read."""

    def remember_cancelled(self, ids: Iterable[str], *, most: int, seconds: float) -> None:
        """Note ids for :meth:`cancelled_lately`; messages that have them do not change.

        most: how many ids are kept, the latest, whoever has noted them
        seconds: for how long
        """
        every = list(dict.fromkeys(ids))
        calls = [
            ScriptCall(
                load("cancelled"),
                (self._context.keys.cancelled,),
                (most, int(seconds * 1000), *some),
                int,
            )
            for some in parts_of(every, REMEMBERED_PER_CALL)
        ]
        self._runner.run_all(calls)

    def cancelled_lately(self, seconds: float) -> list[str]:
        """The ids that were noted as cancelled within so many seconds, the oldest first."""
        client, key = self._runner.client, self._context.keys.cancelled
        now, us = client.time()
        since = now * 1000 + us // 1000 - int(seconds * 1000)
        found: dict[str, None] = {}
        while True:
            page = client.zrangebyscore(
                key, f"({since}", "+inf", start=len(found), num=READ_PER_CALL
            )
            found.update(dict.fromkeys(map(text, page)))
            if len(page) < READ_PER_CALL:
                return list(found)

    def cancelled_at(self, id: str) -> float | None:
        """When an id was noted as cancelled, in seconds since the epoch; None if it was not."""
        ms = self._runner.client.zscore(self._context.keys.cancelled, id)
        return None if ms is None else ms / 1000

    def speaks_for(self, topics: Iterable[str], name: str, seconds: float) -> list[str]:
        """The topics for which this process is to answer where one of many does.

        name: the process's. Who asks first has a topic for so many seconds, and again with each
            call
        """
        names = list(topics)
        if not names:
            return []
        keys = [self._context.keys.speaker(one) for one in names]
        call = ScriptCall(load("elect"), keys, (name, int(seconds * 1000)), lambda raw: raw[1::2])
        answers = self._runner.run(call)
        return [one for one, mine in zip(names, answers, strict=True) if mine]
