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
    "TimeoutCenter": "center",
    "Consumer": "center",
    "Delivery": "center",
    "Fault": "center",
    "Popped": "center",
    "Cancelled": "operating",
    "Counts": "operating",
    "DEAD": "operating",
    "Found": "operating",
    "IN_FLIGHT": "operating",
    "Page": "operating",
    "Rescheduled": "operating",
    "Summary": "operating",
    "WAITING": "operating",
    "Lateness": "metrics",
    "Measured": "metrics",
    "Metrics": "metrics",
    "ScriptTimes": "metrics",
    "read_metrics": "metrics",
    "read_script_times": "metrics",
    "Limits": "topics",
    "Topic": "topics",
    "COUNTDOWN": "envelope",
    "ENSURE": "envelope",
    "estimate_memory": "memory",
    "migrate_broker": "migrate",
    "migrate_back": "rollback",
    "Migrated": "migrate",
    "Staying": "migrate",
    "reshard_topic": "reshard",
    "Resharded": "reshard",
    "unpack": "envelope",
    "center_for": "connections",
    "check_server": "connections",
    "durability_warnings": "connections",
    "read_memory": "connections",
    "mask_password": "connections",
    "server_url": "connections",
    "EmbeddedServer": "embedded",
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
