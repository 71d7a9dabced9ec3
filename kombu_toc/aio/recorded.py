"""Channels of an event loop's connection with a task library."""

from __future__ import annotations

from ..transport.recorded import RecordedChannel
from .channel import AsyncChannel


class RecordedAsyncChannel(AsyncChannel, RecordedChannel):
    """Publishes, and writes a row for each message before."""
