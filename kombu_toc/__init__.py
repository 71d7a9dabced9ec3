"""A timeout center on Redis, and its Kombu transport.

Importing this package registers the URL schemes (``toc+redis://`` and the rest), which
``pip install`` alone also brings about; everything else is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .plugin import register
from .version import __version__

if TYPE_CHECKING:
    from .aio.center import AsyncTimeoutCenter as AsyncTimeoutCenter
    from .aio.transport import AsyncChannel as AsyncChannel
    from .aio.transport import AsyncTransport as AsyncTransport
    from .aio.waiting import AsyncConsumption as AsyncConsumption
    from .aio.waiting import AsyncTaken as AsyncTaken
    from .center.center import TimeoutCenter as TimeoutCenter
    from .center.consumption import Consumption as Consumption
    from .center.consumption import Taken as Taken
    from .center.requests import NewMessage as NewMessage
    from .center.reshard import Resharded as Resharded
    from .center.reshard import reshard_topic as reshard_topic
    from .center.schedules import SCHEDULE_BASIS as SCHEDULE_BASIS
    from .center.schedules import ScheduleChange as ScheduleChange
    from .center.schedules import ScheduleChanged as ScheduleChanged
    from .center.schedules import Scheduled as Scheduled
    from .center.schedules import ScheduleFiring as ScheduleFiring
    from .center.schedules import schedule_position as schedule_position
    from .center.server import estimate_memory as estimate_memory
    from .client.embedded import EmbeddedServer as EmbeddedServer
    from .client.errors import check_server as check_server
    from .client.errors import durability_warnings as durability_warnings
    from .client.errors import outage_warnings as outage_warnings
    from .client.errors import read_memory as read_memory
    from .client.programs import check_installed as check_installed
    from .client.urls import mask_password as mask_password
    from .client.urls import server_url as server_url
    from .compat.registry import CompatPart as CompatPart
    from .consumer.policy import WorkerPolicy as WorkerPolicy
    from .errors import ActionTimeError as ActionTimeError
    from .errors import AlreadyThereError as AlreadyThereError
    from .errors import CompatError as CompatError
    from .errors import ConfigurationError as ConfigurationError
    from .errors import ConsumersError as ConsumersError
    from .errors import EmbeddedServerError as EmbeddedServerError
    from .errors import EnvelopeError as EnvelopeError
    from .errors import KeptError as KeptError
    from .errors import LibraryError as LibraryError
    from .errors import MessageError as MessageError
    from .errors import MigrationError as MigrationError
    from .errors import NotPermittedError as NotPermittedError
    from .errors import PartialError as PartialError
    from .errors import PriorityStepsError as PriorityStepsError
    from .errors import PutManyError as PutManyError
    from .errors import RateLimitedError as RateLimitedError
    from .errors import ReceiptError as ReceiptError
    from .errors import ReplicationError as ReplicationError
    from .errors import ReshardError as ReshardError
    from .errors import ServerError as ServerError
    from .errors import SlotCountError as SlotCountError
    from .errors import TocError as TocError
    from .errors import TraitError as TraitError
    from .errors import UniqueError as UniqueError
    from .errors import UnknownTopicError as UnknownTopicError
    from .library.opening import center_for as center_for
    from .library.outbox import outbox as outbox
    from .metrics.counters import Lateness as Lateness
    from .metrics.counters import Measured as Measured
    from .metrics.counters import Metrics as Metrics
    from .metrics.counters import ScriptTimes as ScriptTimes
    from .metrics.counters import read_metrics as read_metrics
    from .metrics.counters import read_script_times as read_script_times
    from .migrate import Migrated as Migrated
    from .migrate import Staying as Staying
    from .migrate import migrate_back as migrate_back
    from .migrate import migrate_broker as migrate_broker
    from .model.delivery import token_with as token_with
    from .model.library import STATUSES as STATUSES
    from .model.library import Disagreement as Disagreement
    from .model.library import LibraryResharded as LibraryResharded
    from .model.library import LibraryStatus as LibraryStatus
    from .model.library import Rebuilt as Rebuilt
    from .model.library import Record as Record
    from .model.library import RecordPage as RecordPage
    from .model.library import Retried as Retried
    from .model.limits import LIBRARY_TERMS as LIBRARY_TERMS
    from .model.limits import LIMITS as LIMITS
    from .model.limits import NOTIFIER_TERMS as NOTIFIER_TERMS
    from .model.limits import TERMS as TERMS
    from .model.limits import Limits as Limits
    from .model.looking import look as look
    from .model.looking import read_content as read_content
    from .model.message import COUNTDOWN as COUNTDOWN
    from .model.message import ENSURE as ENSURE
    from .model.message import SCHEDULE as SCHEDULE
    from .model.message import Unique as Unique
    from .model.message import pack as pack
    from .model.message import unpack as unpack
    from .model.results import DEAD as DEAD
    from .model.results import IN_FLIGHT as IN_FLIGHT
    from .model.results import WAITING as WAITING
    from .model.results import Cancelled as Cancelled
    from .model.results import Consumer as Consumer
    from .model.results import Counts as Counts
    from .model.results import Delivery as Delivery
    from .model.results import Description as Description
    from .model.results import Edition as Edition
    from .model.results import Fault as Fault
    from .model.results import Found as Found
    from .model.results import Limit as Limit
    from .model.results import Missing as Missing
    from .model.results import Page as Page
    from .model.results import Popped as Popped
    from .model.results import Purged as Purged
    from .model.results import Put as Put
    from .model.results import Rescheduled as Rescheduled
    from .model.results import Settled as Settled
    from .model.results import Summary as Summary
    from .model.results import Unwritten as Unwritten
    from .model.results import Usage as Usage
    from .model.results import Used as Used
    from .model.topic import Topic as Topic
    from .transport.action_time import use_timezone as use_timezone
    from .transport.channel import Captured as Captured
    from .transport.channel import CapturingChannel as CapturingChannel
    from .transport.channel import Channel as Channel
    from .transport.message import Message as Message
    from .transport.publisher import unique_answer as unique_answer
    from .transport.qos import Capacity as Capacity
    from .transport.transport import Transport as Transport

#: The public names, and the module each lives in: the same as above, for a type checker.
_PLACES = {
    "TimeoutCenter": "center.center",
    "Consumption": "center.consumption",
    "Taken": "center.consumption",
    "AsyncTimeoutCenter": "aio.center",
    "AsyncConsumption": "aio.waiting",
    "AsyncTaken": "aio.waiting",
    "AsyncChannel": "aio.channel",
    "AsyncTransport": "aio.transport",
    "check_installed": "client.programs",
    "look": "model.looking",
    "read_content": "model.looking",
    "Consumer": "model.results",
    "Delivery": "model.results",
    "Disagreement": "model.library",
    "LibraryResharded": "model.library",
    "LibraryStatus": "model.library",
    "Rebuilt": "model.library",
    "Record": "model.library",
    "RecordPage": "model.library",
    "Retried": "model.library",
    "STATUSES": "model.library",
    "Description": "model.results",
    "Limit": "model.results",
    "Fault": "model.results",
    "NewMessage": "center.requests",
    "SCHEDULE_BASIS": "center.schedules",
    "Scheduled": "center.schedules",
    "ScheduleChange": "center.schedules",
    "ScheduleChanged": "center.schedules",
    "ScheduleFiring": "center.schedules",
    "schedule_position": "center.schedules",
    "Popped": "model.results",
    "Put": "model.results",
    "Cancelled": "model.results",
    "Counts": "model.results",
    "DEAD": "model.results",
    "Edition": "model.results",
    "Found": "model.results",
    "IN_FLIGHT": "model.results",
    "Missing": "model.results",
    "Page": "model.results",
    "Rescheduled": "model.results",
    "Purged": "model.results",
    "Settled": "model.results",
    "Summary": "model.results",
    "Unwritten": "model.results",
    "WAITING": "model.results",
    "Lateness": "metrics.counters",
    "Measured": "metrics.reading",
    "Metrics": "metrics.counters",
    "ScriptTimes": "metrics.reading",
    "read_metrics": "metrics.reading",
    "read_script_times": "metrics.reading",
    "LIMITS": "model.limits",
    "Limits": "model.limits",
    "LIBRARY_TERMS": "model.limits",
    "NOTIFIER_TERMS": "model.limits",
    "TERMS": "model.limits",
    "token_with": "model.delivery",
    "Topic": "model.topic",
    "Usage": "model.results",
    "Used": "model.results",
    "COUNTDOWN": "model.message",
    "ENSURE": "model.message",
    "estimate_memory": "center.server",
    "migrate_broker": "migrate.from_redis",
    "migrate_back": "migrate.to_redis",
    "Migrated": "migrate.moving",
    "Staying": "migrate.moving",
    "reshard_topic": "center.reshard",
    "Resharded": "center.reshard",
    "SCHEDULE": "model.message",
    "pack": "model.message",
    "unpack": "model.message",
    "center_for": "library.opening",
    "outbox": "library.outbox",
    "check_server": "client.errors",
    "durability_warnings": "client.errors",
    "outage_warnings": "client.errors",
    "read_memory": "client.errors",
    "mask_password": "client.urls",
    "server_url": "client.urls",
    "EmbeddedServer": "client.embedded",
    "Capacity": "transport.qos",
    "Captured": "transport.channel",
    "CapturingChannel": "transport.channel",
    "Channel": "transport.channel",
    "Message": "transport.message",
    "Transport": "transport.transport",
    "unique_answer": "transport.publisher",
    "use_timezone": "transport.action_time",
    "WorkerPolicy": "consumer.policy",
    "CompatPart": "compat.registry",
    "CompatError": "errors",
    "ActionTimeError": "errors",
    "AlreadyThereError": "errors",
    "ConfigurationError": "errors",
    "ConsumersError": "errors",
    "EmbeddedServerError": "errors",
    "EnvelopeError": "errors",
    "KeptError": "errors",
    "LibraryError": "errors",
    "MessageError": "errors",
    "MigrationError": "errors",
    "NotPermittedError": "errors",
    "PartialError": "errors",
    "PriorityStepsError": "errors",
    "RateLimitedError": "errors",
    "ReceiptError": "errors",
    "PutManyError": "errors",
    "ReplicationError": "errors",
    "ReshardError": "errors",
    "ServerError": "errors",
    "SlotCountError": "errors",
    "TocError": "errors",
    "TraitError": "errors",
    "Unique": "model.message",
    "UniqueError": "errors",
    "UnknownTopicError": "errors",
}

__all__ = ("__version__", "register", *_PLACES)

if not TYPE_CHECKING:  # with it, no checker would report a name that does not exist

    def __getattr__(name: str) -> Any:
        try:
            place = _PLACES[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        value = getattr(import_module(f".{place}", __name__), name)
        globals()[name] = value
        return value


register()
