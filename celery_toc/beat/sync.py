"""Puts an app's ``beat_schedule`` as schedules of its timeout center: what is new and what has
changed; and removes what an earlier release of the app has put and this one does not have.

Any number of processes may do it at a time, of several releases: which of them is in force is
decided by the center (:meth:`kombu_toc.TimeoutCenter.editions.edition`), and one process puts it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import kombu_toc

from ..schedules.reading import check_name, read_schedule, read_zone
from ..schedules.schedules import TOGETHER
from . import configured
from .configured import UNUSABLE, Entry, Read, Refused

if TYPE_CHECKING:
    from celery import Celery

    from ..app.task import TaskCenter
    from ..schedules.messages import Plan
    from ..schedules.view import Schedule

#: What the schedules that were put here have before the app's name, as their owner.
OWNER = "beat:"

#: Seconds after which the center is told that putting goes on: well within its patience.
RENEW = 5.0

#: How often all is put again for a process that put something late.
MOST_ROUNDS = 5

#: What a message takes from its task, if nobody says otherwise.
_OF_TASKS = (
    *("serializer", "compression", "priority", "expires", "queue", "exchange", "routing_key"),
    *("ignore_result", "soft_time_limit", "time_limit"),
)

#: What differs in every process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Outcome(NamedTuple):
    """What a :meth:`Sync.run` has done.

    told: the center's verdict; unless it was to put, nothing below has changed
    put, removed: names of schedules that are new or have changed, and that are gone
    unchanged: how many were there as they are
    refused: entries that cannot be put, and why
    """

    told: kombu_toc.Edition
    put: list[str]
    removed: list[str]
    unchanged: int
    refused: list[Refused]


class Sync:
    """What one process has of an app's ``beat_schedule``.

    app: has been finalized, and its tasks are loaded
    center: the app's
    process: a name that no other process has

    Raises ConfigurationError if the app has no name, or one that is too long.
    """

    def __init__(self, app: Celery, center: TaskCenter, process: str) -> None:
        if not app.main:
            raise kombu_toc.ConfigurationError(
                "the app that is to put its beat_schedule has no name: Celery('shop')"
            )
        self._app = app
        self._center = center
        self._process = process
        self._source = str(app.main)
        self._prefix = str(app.conf.get("toc_beat_prefix") or "")
        release = app.conf.get("toc_beat_release")
        self._release = "" if release is None else str(release)
        self._owner = f"{OWNER}{self._source}"
        #: the setting as it was read, and what was in it
        self._configured: dict[Any, Any] | None = None
        self._found = Read([], [])
        self._edition = ""

    def run(self, *, looked: float = 0.0, force: bool = False) -> Outcome:
        """Put what is to be put.

        looked: seconds for which this process has tried
        force: put it also if another release has put something else since
        """
        self._read()
        told = self._tell("force" if force else "use", looked)
        outcome = Outcome(told, [], [], 0, [])
        rounds = 0
        while told.verdict == "put" and rounds < MOST_ROUNDS:
            outcome = self._put_all(told)
            told, rounds = outcome.told, rounds + 1
        return outcome._replace(told=told, refused=[*self._found.refused, *outcome.refused])

    def plan(self) -> Outcome:
        """What :meth:`run` would do if it were to put; nothing is changed."""
        self._read()
        told = kombu_toc.Edition("put", 0, self._edition, self._release, "", 0.0, 0.0)
        new, gone, same, refused = self._compare()
        return Outcome(
            told, [one.name for one in new], gone, same, [*self._found.refused, *refused]
        )

    def _tell(self, what: str, looked: float = 0.0) -> kombu_toc.Edition:
        return self._center.editions.edition(
            self._source,
            self._edition,
            self._process,
            what=what,
            release=self._release,
            looked=looked,
        )

    def _read(self) -> None:
        """Read the setting, unless it is as it was."""
        now = dict(self._app.conf.beat_schedule or {})
        if self._edition and now == self._configured:
            return
        found = configured.read(self._app)
        taken, refused = [], list(found.refused)
        digest = hashlib.sha256(self._prefix.encode(errors="surrogatepass"))
        for entry in found.entries:
            try:
                text = definition(self._app, entry)
            except UNUSABLE as exc:
                refused.append(Refused(entry.name, str(exc)))
            else:
                taken.append(entry)
                digest.update(text.encode(errors="surrogatepass"))
        self._found = Read(taken, refused)
        self._edition, self._configured = digest.hexdigest()[:32], now

    def _compare(self) -> tuple[list[Plan], list[str], int, list[Refused]]:
        """What is to be put, what is to be removed, how much stays, and what is not put."""
        schedules = self._center.schedules
        stored = {one.name: one for one in schedules.each()}
        mine = {name for name, one in stored.items() if one.owner == self._owner}
        with schedules.planning():
            new, same, refused = self._plans(stored)
        # One that cannot be put now stays as it was.
        kept = {self._prefix + one.name for some in self._found for one in some}
        return new, sorted(mine - kept), same, refused

    def _plans(self, stored: Mapping[str, Schedule]) -> tuple[list[Plan], int, list[Refused]]:
        schedules = self._center.schedules
        new: list[Plan] = []
        refused: list[Refused] = []
        same = 0
        for entry in self._found.entries:
            name = self._prefix + entry.name
            there = stored.get(name)
            if there is not None and there.owner != self._owner:
                refused.append(Refused(entry.name, _taken(there.owner)))
                continue
            try:
                arguments = {**entry.arguments(), "owner": self._owner}
                plan = schedules.plan(name, entry.task, entry.schedule, **arguments)
            except UNUSABLE as exc:
                refused.append(Refused(entry.name, str(exc)))
                continue
            if there is not None and there.fingerprint == plan.record.fingerprint:
                same += 1
            else:
                new.append(plan)
        return new, same, refused

    def _put_all(self, told: kombu_toc.Edition) -> Outcome:
        new, gone, same, refused = self._compare()
        schedules = self._center.schedules.signed(f"beat_schedule of {self._process}")
        put: list[str] = []
        removed: list[str] = []
        renewed = time.monotonic()
        parts = [new[start : start + TOGETHER] for start in range(0, len(new), TOGETHER)]
        whats: list[list[Plan] | str] = [*parts, *gone]
        for part in whats:
            if time.monotonic() - renewed > RENEW:
                told = self._tell("renew")
                renewed = time.monotonic()
                if told.verdict != "put":
                    return Outcome(told, put, removed, same, refused)
            if isinstance(part, str):
                if schedules.delete(part, owner=self._owner):
                    removed.append(part)
                continue
            for plan, kept in zip(part, schedules.keep_many(part, own=True), strict=True):
                if isinstance(kept, Exception):
                    refused.append(Refused(plan.name.removeprefix(self._prefix), str(kept)))
                else:
                    put.append(plan.name)
        return Outcome(self._tell("done"), put, removed, same, refused)


def definition(app: Celery, entry: Entry) -> str:
    """A text that two entries share if and only if the same is to be put for both.

    It asks nobody, and has Celery make no message: every worker makes it of every entry. Raises
    ScheduleError for an entry that cannot be put, TypeError for arguments that no JSON has.
    """
    check_name(entry.name)
    zone = read_zone(app, entry.name, entry.schedule, entry.rules.get("timezone"))
    either_day = bool(entry.rules.get("either_day"))
    when = read_schedule(entry.name, entry.schedule, zone, None, 0, either_day=either_day).to_json()
    relative = bool(getattr(entry.schedule, "relative", False))
    task = app.tasks.get(entry.task)
    defaults = {name: getattr(task, name, None) for name in _OF_TASKS}
    route = app.amqp.router.route({}, entry.task, entry.args, entry.kwargs)
    where = {name: getattr(value, "name", value) for name, value in route.items()}
    said = [entry.name, entry.task, entry.arguments(), zone, when, relative, defaults, where]
    said.append(app.conf.task_default_queue)
    return _ADDRESS.sub("", json.dumps(said, sort_keys=True, default=_plain)) + "\n"


def _plain(value: Any) -> Any:
    return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else repr(value)


def _taken(owner: str | None) -> str:
    by = f"by {owner!r}" if owner else "by hand"
    return (
        f"there is a schedule of that name, put {by}: give the entry another name, or set "
        "toc_beat_prefix"
    )
