"""One recurring task, wherever it was configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kombu.exceptions import KombuError

import kombu_toc

#: What a schedule that cannot be planned raises: of many, the others are planned all the same.
UNUSABLE = (kombu_toc.TocError, KombuError, ValueError, TypeError, KeyError, OverflowError)


@dataclass(frozen=True)
class Entry:
    """A recurring task as a beat has it.

    schedule: what ``center.schedules.put`` takes
    options: those of ``apply_async``
    rules: further arguments of ``center.schedules.put``, such as ``misfire`` and ``timezone``
    paused: whether it fires only after somebody resumes it
    """

    name: str
    task: str
    schedule: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    paused: bool = False

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``center.schedules.put``, without the owner."""
        return {
            "args": list(self.args),
            "kwargs": dict(self.kwargs),
            "options": dict(self.options),
            **self.rules,
        }


class Refused(NamedTuple):
    """An entry that cannot be taken, and why."""

    name: str
    reason: str


class Read(NamedTuple):
    """What a reader has found."""

    entries: list[Entry]
    refused: list[Refused]


class NotTakenError(ValueError):
    """Why an entry cannot be taken."""
