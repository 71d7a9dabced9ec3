"""Puts what was read from another beat's tables."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from . import configured
from .configured import UNUSABLE, Entry, Read, Refused

if TYPE_CHECKING:
    from celery import Celery

    from ..app.task import TaskCenter
    from ..schedules.messages import Plan

#: What imported schedules have before the name of their source, as their owner.
OWNER = "import:"


class Imported(NamedTuple):
    """What an import has done, or would do.

    put: names of schedules that are new, or have changed
    paused: those of them that are put paused, as they were
    unchanged: how many were there as they are
    refused: entries that are not taken, and why
    """

    put: list[str]
    paused: list[str]
    unchanged: int
    refused: list[Refused]


def import_entries(
    app: Celery,
    center: TaskCenter,
    read: Read,
    owner: str,
    *,
    dry_run: bool = False,
    force: bool = False,
) -> Imported:
    """Put entries as schedules; what is there as it is stays untouched.

    owner: whose schedules they become
    dry_run: change nothing
    force: also replace schedules that others have put under the same names
    """
    schedules = center.schedules
    stored = {one.name: one for one in schedules.each()}
    mine = {one.name for some in configured.read(app) for one in some}
    put: list[str] = []
    paused: list[str] = []
    unchanged = 0
    refused = list(read.refused)
    plans: list[tuple[Entry, Plan]] = []
    with schedules.planning():
        for entry in read.entries:
            if entry.name in mine:
                refused.append(
                    Refused(
                        entry.name,
                        "it is in the app's beat_schedule: 'celery toc schedule sync' puts it, or "
                        "workers with toc_beat",
                    )
                )
                continue
            try:
                what = (entry.name, entry.task, entry.schedule)
                plan = schedules.plan(*what, **entry.arguments(), owner=owner)
            except UNUSABLE as exc:
                refused.append(Refused(entry.name, str(exc)))
                continue
            there = stored.get(entry.name)
            if there is not None and there.owner != owner and not force:
                by = f"by {there.owner!r}" if there.owner else "by hand"
                why = f"a schedule of that name was put {by}: --force replaces it"
                refused.append(Refused(entry.name, why))
            elif there is not None and there.fingerprint == plan.record.fingerprint:
                unchanged += 1
            else:
                plans.append((entry, plan))
    kept = [] if dry_run else schedules.keep_many([plan for _, plan in plans])
    for (entry, _), done in zip_longest(plans, kept):
        if isinstance(done, Exception):
            refused.append(Refused(entry.name, str(done)))
            continue
        put.append(entry.name)
        if entry.paused and entry.name not in stored:
            paused.append(entry.name)
            if not dry_run:
                schedules.pause(entry.name)
    return Imported(put, paused, unchanged, refused)
