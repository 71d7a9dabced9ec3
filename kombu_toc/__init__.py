"""A timeout center on Redis, and its Kombu transport.

Importing this package registers the URL schemes (``toc+redis://`` and the rest), which
``pip install`` alone also brings about; everything else is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .plugin import register
from .version import __version__

#: The public names, and the module each lives in.
_PLACES = {
    "TimeoutCenter": "center.center",
    "Consumer": "center.center",
    "Delivery": "center.center",
    "Fault": "center.center",
    "Popped": "center.center",
    "Cancelled": "center.operations",
    "Counts": "center.operations",
    "DEAD": "center.operations",
    "Found": "center.operations",
    "IN_FLIGHT": "center.operations",
    "Page": "center.operations",
    "Rescheduled": "center.operations",
    "Summary": "center.operations",
    "WAITING": "center.operations",
    "Lateness": "metrics.counters",
    "Measured": "metrics.counters",
    "Metrics": "metrics.counters",
    "ScriptTimes": "metrics.counters",
    "read_metrics": "metrics.counters",
    "read_script_times": "metrics.counters",
    "Limits": "model.topic",
    "Topic": "model.topic",
    "COUNTDOWN": "model.envelope",
    "ENSURE": "model.envelope",
    "estimate_memory": "center.memory",
    "migrate_broker": "migrate.from_redis",
    "migrate_back": "migrate.to_redis",
    "Migrated": "migrate.from_redis",
    "Staying": "migrate.from_redis",
    "reshard_topic": "center.reshard",
    "Resharded": "center.reshard",
    "unpack": "model.envelope",
    "center_for": "client.connections",
    "check_server": "client.connections",
    "durability_warnings": "client.connections",
    "read_memory": "client.connections",
    "mask_password": "client.connections",
    "server_url": "client.connections",
    "EmbeddedServer": "client.embedded",
    "Capacity": "transport.channel",
    "Channel": "transport.channel",
    "Message": "transport.channel",
    "Transport": "transport.transport",
    "use_timezone": "transport.channel",
    "ActionTimeError": "errors",
    "AlreadyThereError": "errors",
    "ConfigurationError": "errors",
    "ConsumersError": "errors",
    "EmbeddedServerError": "errors",
    "EnvelopeError": "errors",
    "MigrationError": "errors",
    "NotPermittedError": "errors",
    "PriorityStepsError": "errors",
    "ReplicationError": "errors",
    "ReshardError": "errors",
    "ServerError": "errors",
    "SlotCountError": "errors",
    "TocError": "errors",
}

__all__ = ("__version__", "register", *_PLACES)


def __getattr__(name: str) -> Any:
    try:
        place = _PLACES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(f".{place}", __name__), name)
    globals()[name] = value
    return value


register()
