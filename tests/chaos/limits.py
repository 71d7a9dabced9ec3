"""What the ledger says about queues that limit what starts (`app_queues.LIMITED`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .app_queues import LIMITED

#: Seconds for which the two clocks of a task's start may differ: the pool's process writes down
#: its start after the worker has given it the task.
NOTED = 0.05


class Spell(NamedTuple):
    """One run: from when to when it certainly went on and had its lease.

    whole: whether that is until it had finished
    """

    began: float
    ended: float
    id: str
    whole: bool


def judge_limits(
    steps: Mapping[str, Sequence[dict[str, Any]]], events: Sequence[Any]
) -> tuple[list[str], list[str]]:
    """Ids of tasks that began while as many as may run were running, and of those that began
    before one of their key that goes first.

    steps: what was written down of each task, in order
    """
    spells: dict[str, list[Spell]] = defaultdict(list)
    sent: dict[tuple[str, str], list[tuple[float, float, float, str]]] = defaultdict(list)
    for id, told in steps.items():
        sending = next(entry for entry in told if entry["what"] == "sending")
        queue, key = sending["queue"], sending.get("key", "")
        if queue not in LIMITED or not key:
            continue
        serial = "key_order" in LIMITED[queue]
        place = f"{queue} {key}" if serial else queue
        some = _spells(id, told, events)
        if serial and len(some) == sending["times"] + 1 and all(one.whole for one in some):
            # Until it was sent again and had run, it held its key, unless the broker forgot that.
            began, ended = some[0].began, some[-1].ended
            if not any(event.forgets and began <= event.at <= ended for event in events):
                some = [some[0]._replace(ended=ended)]
        spells[place] += some
        done = [entry["at"] for entry in told if entry["what"] == "sent"]
        runs = [entry["at"] for entry in told if entry["what"] == "started"]
        if serial and done and runs and not sending["times"]:
            due = max(sending["eta"] or 0.0, sending["at"])
            sent[queue, key].append((due, done[0], runs[0], id))
    crowded = []
    for place, some in spells.items():
        most = int(str(LIMITED[place.partition(" ")[0]].get("concurrency", 1)))
        crowded += _crowded(some, most)
    if any(event.step or event.forgets for event in events):
        return crowded, []  # what comes first is another one by the server's clock, or it forgot
    return crowded, [id for some in sent.values() for id in _disordered(sorted(some))]


def _spells(id: str, told: Sequence[dict[str, Any]], events: Sequence[Any]) -> list[Spell]:
    found = []
    for run in (entry for entry in told if entry["what"] == "started"):
        ends = [
            entry["at"]
            for entry in told
            if entry["what"] == "finished"
            and entry["at"] >= run["at"]
            and (entry["worker"], entry["pid"]) == (run["worker"], run["pid"])
        ]
        end = min(ends, default=run["at"])
        whole = bool(ends)
        # Whoever was killed runs no more. Whoever stood still for longer than its lease runs on,
        # and its place is another's by then.
        hits = [event.at for event in events if event.hits(run) and event.at >= run["at"] - NOTED]
        hits += [event.at for event in events if event.forgets and event.at >= run["at"] - 1.0]
        whole = whole and min(hits, default=end) >= end
        found.append(Spell(run["at"], min([end, *hits]), id, whole))
    return found


def _crowded(spells: Sequence[Spell], most: int) -> list[str]:
    found = []
    for one in spells:
        meanwhile = [o for o in spells if o.began <= one.began < o.ended - NOTED and o is not one]
        if len(meanwhile) >= most:
            found.append(one.id)
    return found


def _disordered(sent: Sequence[tuple[float, float, float, str]]) -> list[str]:
    """Of tasks as (due, had been sent, began first, id)."""
    found = []
    for due, done, began, _ in sent:
        for other_due, _, other_began, other in sent:
            # It was there when the other became due, and it was due.
            if max(due, done) < other_due and other_began < began and due < other_began:
                found.append(other)
    return sorted(set(found))
