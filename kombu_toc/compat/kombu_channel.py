"""What Kombu's virtual channels and transports keep for their subclasses.

Touches: of `virtual.Channel` the fields ``_tag_to_queue``, ``_active_queues``, ``_consumers`` and
``_qos``, of `virtual.Transport` ``_avail_channels``, of `virtual.QoS` ``_on_collect``; and the
methods that a subclass replaces: ``_put``, ``_size``, ``_purge``, ``_has_queue``, ``_lookup``.

Why: these are what transports outside of Kombu are made of, as its own are; but no page of Kombu's
says so, and the fields have no other name.

Read in Kombu 5.3.7, 5.4.2, 5.5.4, 5.6.2 and 5.7.0.

Without: nothing can be sent or consumed, and nothing starts.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import virtual

from .registry import CompatPart

_METHODS = ("_put", "_size", "_purge", "_has_queue", "_lookup")

KOMBU_CHANNEL = CompatPart(
    "kombu-channel",
    touches="fields of Kombu's virtual.Channel, virtual.Transport and virtual.QoS",
    lost="messages can be neither sent nor consumed",
    check=lambda channel: [
        *CompatPart.missing(channel, "_tag_to_queue", "_active_queues", "_consumers", "_qos"),
        *CompatPart.missing(channel.connection, "_avail_channels"),
        *CompatPart.missing(virtual.Channel, *_METHODS),
    ],
    way_out="Install Kombu 5.3.7 to 5.7",
)

_checked = False


def check(channel: Any) -> None:
    """Once in a process. Raises CompatError."""
    global _checked
    if not _checked:
        KOMBU_CHANNEL.usable(channel)
        _checked = True
