"""Celery's side of a timeout center. No import is needed to use it: the broker URL is enough."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import kombu_toc
from kombu_toc import __version__

if TYPE_CHECKING:
    from celery import Celery

    from kombu_toc import outbox as outbox

    from .app.sending import Unique as Unique
    from .app.sending import send_many as send_many
    from .app.sending import unique as unique
    from .app.task import Task as Task
    from .app.task import TaskCenter as TaskCenter
    from .schedules.rules import ScheduleError as ScheduleError
    from .schedules.rules import UnknownScheduleError as UnknownScheduleError
    from .schedules.schedules import Schedules as Schedules
    from .schedules.state import Firing as Firing
    from .schedules.state import Listed as Listed
    from .schedules.state import Schedule as Schedule
    from .schedules.state import SchedulesByName as SchedulesByName

#: Public names that are loaded when they are first used, and the module each lives in.
_PLACES = {
    name: place
    for place, names in {
        "app.sending": "Unique send_many unique",
        "app.task": "Task TaskCenter",
        "schedules.rules": "ScheduleError UnknownScheduleError",
        "schedules.schedules": "Schedules",
        "schedules.state": "Firing Listed Schedule SchedulesByName",
    }.items()
    for name in names.split()
}

__all__ = ("__version__", "biz", "outbox", "timeout_center", *_PLACES)


def biz(type: str | None = None, id: object = None, /, **attributes: object) -> dict[str, Any]:
    """Headers with a business type, a business id and attributes of your own, by which the task
    library finds a task::

        expire.apply_async((42,), headers=celery_toc.biz("order", 42, shop="berlin"))

    type: at most 64 characters
    id: its text has at most 255 characters
    attributes: their texts are kept; 4,000 characters in all, as JSON
    """
    headers: dict[str, Any] = {} if type is None else {"x-biz-type": type}
    if id is not None:
        headers["x-biz-id"] = str(id)
    if attributes:
        headers["x-attributes"] = {name: str(value) for name, value in attributes.items()}
    return headers


def timeout_center(app: Celery, **options: Any) -> TaskCenter:
    """The timeout center of an app's broker.

    options: added to the app's ``broker_transport_options``

    Raises ConfigurationError if the app's broker URL is not one of ours. The connection is made
    when it is first used.
    """
    from .app.task import TaskCenter, broker_of

    broker = broker_of(app)
    options = {**broker.options, **options}
    return TaskCenter(app, kombu_toc.center_for(broker.url, ssl=broker.ssl, **options))


if not TYPE_CHECKING:  # with it, no checker would report a name that does not exist

    def __getattr__(name: str) -> Any:
        if name == "outbox":
            value = kombu_toc.outbox  # it needs an extra
        elif name in _PLACES:
            value = getattr(import_module(f".{_PLACES[name]}", __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value
