"""What the processes of one server and prefix tell each other: which ids were cancelled, and who
answers where one of many is to answer."""

from __future__ import annotations

from collections.abc import Iterable

from ..model.keys import Keys
from ..scripts.call import ScriptCall, load, text
from .runner import Runner

#: Ids that one call remembers as cancelled.
REMEMBERED_PER_CALL = 500

#: Ids that one call reads.
READ_PER_CALL = 5000


class SharedNotes:
    """Notes in Redis that every process may read."""

    def __init__(self, runner: Runner, keys: Keys) -> None:
        self._runner = runner
        self._keys = keys

    def remember_cancelled(self, ids: Iterable[str], *, most: int, seconds: float) -> None:
        """Note ids for :meth:`cancelled_lately`; messages that have them do not change.

        most: how many ids are kept, the latest, whoever has noted them
        seconds: for how long
        """
        every = list(dict.fromkeys(ids))
        calls = [
            ScriptCall(
                load("cancelled"),
                (self._keys.cancelled,),
                (most, int(seconds * 1000), *every[start : start + REMEMBERED_PER_CALL]),
                int,
            )
            for start in range(0, len(every), REMEMBERED_PER_CALL)
        ]
        self._runner.run_all(calls)

    def cancelled_lately(self, seconds: float) -> list[str]:
        """The ids that were noted as cancelled within so many seconds, the oldest first."""
        client = self._runner.client
        now, us = client.time()
        since = now * 1000 + us // 1000 - int(seconds * 1000)
        found: dict[str, None] = {}
        while True:
            page = client.zrangebyscore(
                self._keys.cancelled, f"({since}", "+inf", start=len(found), num=READ_PER_CALL
            )
            found.update(dict.fromkeys(map(text, page)))
            if len(page) < READ_PER_CALL:
                return list(found)

    def speaks_for(self, topics: Iterable[str], name: str, seconds: float) -> list[str]:
        """The topics for which this process is to answer where one of many does.

        name: the process's. Who asks first has a topic for so many seconds, and again with each
            call
        """
        names = list(topics)
        if not names:
            return []
        keys = [self._keys.speaker(one) for one in names]
        call = ScriptCall(load("speak"), keys, (name, int(seconds * 1000)), list)
        answers = self._runner.run(call)
        return [one for one, mine in zip(names, answers, strict=True) if mine]
