"""Which private names of other libraries are used, and whether they may be.

A part is one use of what another library does not promise to keep. On start it is checked whether
what the part expects is there. If not, or if ``TOC_COMPAT_OFF`` names the part (several are
separated by commas), one log line says what is lost, and all else goes on without it. A part that
is needed so that no task is lost or executed twice raises `CompatError` instead: it cannot be
switched off, and nothing starts without it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import CompatError, ConfigurationError

logger = logging.getLogger(__name__)

#: The environment's variable that names the parts which are not to be used.
SWITCH = "TOC_COMPAT_OFF"

_parts: dict[str, CompatPart] = {}


@dataclass(eq=False, kw_only=True)
class CompatPart:
    """One use of private names.

    name: by which it is switched off
    touches: what it touches, in a few words
    lost: what is lost without it, in a few words that begin with a small letter
    check: gives the names that are missing; it gets what :meth:`usable` gets
    way_out: what to do if names are missing; only of a part that nothing starts without
    """

    name: str = field(kw_only=False)
    touches: str
    lost: str
    check: Callable[..., Iterable[str]]
    way_out: str = field(default_factory=str)
    _told: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        if self.name in _parts:
            raise ValueError(f"there is a part {self.name!r} already")
        _parts[self.name] = self

    @property
    def required(self) -> bool:
        """Whether nothing starts without it."""
        return bool(self.way_out)

    def usable(self, *subjects: Any) -> bool:
        """Whether it is to be used: it is not switched off, and what it expects is there.

        subjects: the objects whose names are checked

        Raises CompatError if it is required and a name is missing, ConfigurationError if
        ``TOC_COMPAT_OFF`` names what cannot be switched off or, once all parts are known, what
        is no part.
        """
        if self.name in switched_off():
            self._tell(logging.INFO, f"{self.name} is switched off: {self.lost}")
            return False
        missing = ", ".join(self.check(*subjects))
        if not missing:
            return True
        if self.required:
            raise CompatError(
                f"{missing} is missing, of which {self.name} makes use; without it, {self.lost}. "
                f"{self.way_out}"
            )
        self._tell(logging.WARNING, f"{self.name}: {missing} is missing: {self.lost}")
        return False

    @staticmethod
    def missing(subject: Any, *names: str) -> list[str]:
        """Those of the names that an object does not have, as a check gives them."""
        what = subject.__name__ if hasattr(subject, "__name__") else type(subject).__name__
        return [f"{what}.{name}" for name in names if not hasattr(subject, name)]

    @staticmethod
    def check_names() -> None:
        """Call it when all parts are known.

        Raises ConfigurationError if ``TOC_COMPAT_OFF`` names what is no part, or a required one.
        """
        for name in sorted(switched_off()):
            if name not in _parts:
                known = ", ".join(name for name, part in parts().items() if not part.required)
                raise ConfigurationError(
                    f"{SWITCH} names {name!r}, which is no part; these can be switched off: {known}"
                )

    def _tell(self, level: int, line: str) -> None:
        if line not in self._told:  # once, and not at every reconnect
            self._told.add(line)
            logger.log(level, "Compatibility: %s", line)


def parts() -> dict[str, CompatPart]:
    """The parts that are known in this process, by name."""
    return dict(sorted(_parts.items()))


def switched_off() -> set[str]:
    """The parts that are not to be used. Raises ConfigurationError if one of them is required."""
    names = _names()
    for name in names:
        part = _parts.get(name)
        if part is not None and part.required:
            raise ConfigurationError(
                f"{SWITCH} names {name!r}, which cannot be switched off: without it, {part.lost}"
            )
    return names


def _names() -> set[str]:
    named = (name.strip() for name in os.environ.get(SWITCH, "").split(","))
    return {name for name in named if name}
