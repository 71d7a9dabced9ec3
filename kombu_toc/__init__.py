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
    from .aio.center import AsyncConsumption as AsyncConsumption
    from .aio.center import AsyncTaken as AsyncTaken
    from .aio.center import AsyncTimeoutCenter as AsyncTimeoutCenter
    from .aio.transport import AsyncChannel as AsyncChannel
    from .aio.transport import AsyncTransport as AsyncTransport
    from .center.calls import NewMessage as NewMessage
    from .center.calls import ScheduleChange as ScheduleChange
    from .center.calls import ScheduleFiring as ScheduleFiring
    from .center.center import TimeoutCenter as TimeoutCenter
    from .center.center import estimate_memory as estimate_memory
    from .center.consumption import Consumption as Consumption
    from .center.consumption import Taken as Taken
    from .center.reshard import Resharded as Resharded
    from .center.reshard import reshard_topic as reshard_topic
    from .center.schedules import SCHEDULE_BASIS as SCHEDULE_BASIS
    from .center.schedules import ScheduleChanged as ScheduleChanged
    from .center.schedules import Scheduled as Scheduled
    from .center.schedules import schedule_position as schedule_position
    from .client.embedded import EmbeddedServer as EmbeddedServer
    from .client.errors import check_server as check_server
    from .client.errors import durability_warnings as durability_warnings
    from .client.errors import outage_warnings as outage_warnings
    from .client.errors import read_memory as read_memory
    from .client.options import known_options as known_options
    from .client.options import mask_password as mask_password
    from .client.options import server_url as server_url
    from .client.programs import check_installed as check_installed
    from .compat import CompatPart as CompatPart
    from .consumer.state import WorkerPolicy as WorkerPolicy
    from .errors import *  # noqa: F403 - what it defines is what can go wrong, all of it public
    from .library.opening import center_for as center_for
    from .library.outbox import outbox as outbox
    from .metrics import Lateness as Lateness
    from .metrics import Measured as Measured
    from .metrics import Metrics as Metrics
    from .metrics import ScriptTimes as ScriptTimes
    from .metrics import read_metrics as read_metrics
    from .metrics import read_script_times as read_script_times
    from .migrate import Migrated as Migrated
    from .migrate import Staying as Staying
    from .migrate import migrate_back as migrate_back
    from .migrate import migrate_broker as migrate_broker
    from .model.delivery import token_with as token_with
    from .model.failures import FailedTask as FailedTask
    from .model.failures import FailureBounds as FailureBounds
    from .model.failures import FailureFilter as FailureFilter
    from .model.failures import FailureGroup as FailureGroup
    from .model.failures import FailurePage as FailurePage
    from .model.failures import FailuresRetried as FailuresRetried
    from .model.library import STATUSES as STATUSES
    from .model.library import Disagreement as Disagreement
    from .model.library import LibraryResharded as LibraryResharded
    from .model.library import LibraryStatus as LibraryStatus
    from .model.library import Rebuilt as Rebuilt
    from .model.library import Record as Record
    from .model.library import RecordPage as RecordPage
    from .model.limits import LIBRARY_TERMS as LIBRARY_TERMS
    from .model.limits import LIMITS as LIMITS
    from .model.limits import NOTIFIER_TERMS as NOTIFIER_TERMS
    from .model.limits import TERMS as TERMS
    from .model.limits import Limits as Limits
    from .model.message import COUNTDOWN as COUNTDOWN
    from .model.message import ENSURE as ENSURE
    from .model.message import SCHEDULE as SCHEDULE
    from .model.message import Unique as Unique
    from .model.message import compress as compress
    from .model.message import expand as expand
    from .model.message import look as look
    from .model.message import pack as pack
    from .model.message import read_content as read_content
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
    from .model.timetext import read_span as read_span
    from .model.timetext import read_time as read_time
    from .model.timetext import use_timezone as use_timezone
    from .model.topic import Topic as Topic
    from .transport.channel import Captured as Captured
    from .transport.channel import CapturingChannel as CapturingChannel
    from .transport.channel import Channel as Channel
    from .transport.publisher import unique_answer as unique_answer
    from .transport.receiving import Capacity as Capacity
    from .transport.receiving import Message as Message
    from .transport.transport import Transport as Transport

#: The public names, by the module that each lives in: the same as above, for a type checker.
_PLACES = {
    name: place
    for place, names in {
        "aio.center": "AsyncConsumption AsyncTaken AsyncTimeoutCenter",
        "aio.transport": "AsyncChannel AsyncTransport",
        "center.calls": "NewMessage ScheduleChange ScheduleFiring",
        "center.center": "TimeoutCenter estimate_memory",
        "center.consumption": "Consumption Taken",
        "center.reshard": "Resharded reshard_topic",
        "center.schedules": "SCHEDULE_BASIS ScheduleChanged Scheduled schedule_position",
        "client.embedded": "EmbeddedServer",
        "client.errors": "check_server durability_warnings outage_warnings read_memory",
        "client.options": "known_options mask_password server_url",
        "client.programs": "check_installed",
        "compat": "CompatPart",
        "consumer.state": "WorkerPolicy",
        "errors": (
            "ActionTimeError AlreadyThereError CompatError ConfigurationError ConsumersError "
            "EmbeddedServerError EnvelopeError FailoverError KeptError LibraryError MessageError "
            "MigrationError NotPermittedError PartialError PriorityStepsError PutManyError "
            "RateLimitedError ReceiptError ReplicationError ReshardError ServerError "
            "SlotCountError TocError TraitError UniqueError UnknownTopicError"
        ),
        "library.opening": "center_for",
        "library.outbox": "outbox",
        "metrics": "Lateness Measured Metrics ScriptTimes read_metrics read_script_times",
        "migrate": "Migrated Staying migrate_back migrate_broker",
        "model.delivery": "token_with",
        "model.failures": (
            "FailedTask FailureBounds FailureFilter FailureGroup FailurePage FailuresRetried"
        ),
        "model.library": (
            "Disagreement LibraryResharded LibraryStatus Rebuilt Record RecordPage STATUSES"
        ),
        "model.limits": "LIBRARY_TERMS LIMITS Limits NOTIFIER_TERMS TERMS",
        "model.message": (
            "COUNTDOWN ENSURE SCHEDULE Unique compress expand look pack read_content unpack"
        ),
        "model.results": (
            "Cancelled Consumer Counts DEAD Delivery Description Edition Fault Found IN_FLIGHT "
            "Limit Missing Page Popped Purged Put Rescheduled Settled Summary Unwritten Usage "
            "Used WAITING"
        ),
        "model.timetext": "read_span read_time use_timezone",
        "model.topic": "Topic",
        "transport.channel": "Captured CapturingChannel Channel",
        "transport.publisher": "unique_answer",
        "transport.receiving": "Capacity Message",
        "transport.transport": "Transport",
    }.items()
    for name in names.split()
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
