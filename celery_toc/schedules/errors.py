"""What can be wrong with a schedule."""

from __future__ import annotations

import kombu_toc


class ScheduleError(kombu_toc.ConfigurationError):
    """A schedule cannot be kept as it was asked for; nothing is changed."""


class UnknownScheduleError(ScheduleError):
    """There is no schedule of that name."""
