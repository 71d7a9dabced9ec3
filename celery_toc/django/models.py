"""The tables of the task library as models that only read.

A library that has several tables of each kind (``toc_library_tables``) needs the same number as
``TOC_LIBRARY_TABLES`` in Django's settings: the models of the others are ``PendingTask1``,
``EndedTask1`` and so on.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from django.conf import settings
from django.db import NotSupportedError, models

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Status(models.IntegerChoices):
    """What has become of a task."""

    PENDING = 0, "pending"
    TAKEN = 1, "taken"
    DONE = 2, "done"
    SUCCEEDED = 3, "succeeded"
    RETRIED = 4, "retried"
    CANCELLED = 5, "cancelled"
    REVOKED = 6, "revoked"
    EXPIRED = 7, "expired"
    FAILED = 8, "failed"
    DEAD = 9, "dead"


class Place(models.IntegerChoices):
    """Where the message of a task is."""

    IN_REDIS = 0, "in Redis"
    NOT_PUT = 1, "not in Redis yet"
    FAR = 2, "in the library only: its time is far ahead"


#: The places of what has not ended: a row that is kept of a dead letter, for a rebuild, has another
#: one. Named one by one, an index leads to the times of each.
_PLACES = tuple(Place.values)


class NameField(models.CharField):
    """A text that MySQL keeps as bytes."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return value.decode() if isinstance(value, bytes) else value

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        found = super().get_db_prep_value(value, connection, prepared)
        in_bytes = isinstance(found, str) and connection.vendor == "mysql"
        return found.encode() if in_bytes else found


def time_of(us: int | None) -> datetime | None:
    """A moment that the library has as microseconds since the epoch."""
    return None if us is None else _EPOCH + timedelta(microseconds=us)


def us_of(moment: datetime) -> int:
    """The same the other way round. A moment without a zone is one of this machine's."""
    return (moment.astimezone(timezone.utc) - _EPOCH) // timedelta(microseconds=1)


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotSupportedError(
        "the task library writes its tables itself: send, cancel and move tasks by Celery, or by "
        "timeout_center(app).library"
    )


class TaskQuerySet(models.QuerySet):
    """What is found of tasks. Nothing is written: the library does that."""

    def of(self, biz_id: object, biz_type: str | None = None) -> TaskQuerySet:
        """Those of a business id, as :func:`celery_toc.biz` has given it; an index serves it."""
        found = self.filter(biz_id=str(biz_id))
        return found if biz_type is None else found.filter(biz_type=biz_type)

    def due(self, since: datetime | None = None, until: datetime | None = None) -> TaskQuerySet:
        """Those with an action time from `since` on, and before `until`."""
        found = self
        if since is not None:
            found = found.filter(action_us__gte=us_of(since))
        if until is not None:
            found = found.filter(action_us__lt=us_of(until))
        return found

    create = bulk_create = bulk_update = update = delete = _refuse
    get_or_create = update_or_create = _refuse


class PendingManager(models.Manager.from_queryset(TaskQuerySet)):  # type: ignore[misc]
    """Finds what has not ended."""

    def get_queryset(self) -> TaskQuerySet:
        found: TaskQuerySet = super().get_queryset().filter(place__in=_PLACES)
        return found


class Task(models.Model):
    """A message of a task: the retries of one are messages of their own, of the same id.

    The tables tell rows apart by id, token and queue. Django takes the id alone for the key, so
    use ``filter(id=...)`` rather than ``get``.
    """

    id = NameField(max_length=255, primary_key=True)
    token = NameField(max_length=16, help_text="tells the messages of one id from each other")
    topic = NameField("queue", max_length=255)
    status = models.SmallIntegerField(choices=Status.choices)
    action_us = models.BigIntegerField("due, in microseconds since the epoch")
    task = NameField(max_length=255, null=True, help_text="the task's name")
    biz_type = NameField("business type", max_length=64, null=True)
    biz_id = NameField("business id", max_length=255, null=True)
    attributes = models.JSONField(null=True, help_text="of your own")
    attempts = models.SmallIntegerField(help_text="how often it was delivered")
    worker = NameField(max_length=255, null=True, help_text="who had it last")
    error = models.TextField(null=True, help_text="what went wrong last")
    created_us = models.BigIntegerField("sent, in microseconds since the epoch")
    modified_us = models.BigIntegerField("changed, in microseconds since the epoch")

    objects = TaskQuerySet.as_manager()

    #: the fields that tell it from every other
    KEY: tuple[str, ...] = ("id", "token", "topic")

    class Meta:
        abstract = True
        managed = False
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.task or 'task'} {self.id}"

    save = delete = _refuse

    @property
    def due(self) -> datetime | None:
        """When it is to run."""
        return time_of(self.action_us)

    @property
    def created(self) -> datetime | None:
        """When it was sent."""
        return time_of(self.created_us)

    @property
    def modified(self) -> datetime | None:
        """When something has become of it last."""
        return time_of(self.modified_us)


class Center(models.Model):
    """The timeout center, which has no table: what users may do on its page
    (:mod:`celery_toc.web.django`)."""

    class Meta:
        managed = False
        default_permissions = ()
        verbose_name = verbose_name_plural = "Queues and messages"
        permissions = (
            ("read_center", "Can look at queues and messages"),
            ("write_center", "Can move and cancel messages"),
            ("operate_center", "Can change queues, schedules and dead letters"),
        )


def _models(number: int) -> tuple[type[Task], type[Task]]:
    """The models of the tables with that number."""
    which, shown = str(number or ""), f" (table {number})" if number else ""

    def meta(kind: str, name: str) -> type:
        values = {
            "db_table": f"toc_{kind}_{number}",
            "verbose_name": f"{name} task{shown}",
            "verbose_name_plural": f"{name} tasks{shown}",
            "abstract": False,
        }
        return type("Meta", (Task.Meta,), values)

    of = {"__module__": __name__}
    pending = type(
        f"PendingTask{which}",
        (Task,),
        {
            **of,
            "__doc__": "A task that has not ended.",
            "objects": PendingManager(),
            "place": models.SmallIntegerField(choices=Place.choices),
            "priority": models.SmallIntegerField(),
            # As an index has it: a page of ten million rows costs what a page of ten costs.
            "Meta": type("Meta", (meta("pending", "pending"),), {"ordering": ORDER}),
        },
    )
    ended = type(
        f"EndedTask{which}",
        (Task,),
        {
            **of,
            "__doc__": "A task that has ended.",
            "day": models.BigIntegerField(help_text="on which it has ended, since the epoch"),
            "KEY": (*Task.KEY, "day"),
            "Meta": type("Meta", (meta("history", "ended"),), {"ordering": ENDED_ORDER}),
        },
    )
    return pending, ended


#: The order of what is pending.
ORDER = ("place", "action_us", "id")

#: The order of what has ended: what has failed before what is done, the latest first. An index has
#: them so; of a table with partitions, no index has one more column.
ENDED_ORDER = ("-status", "-action_us")

#: How many tables of each kind there are.
TABLES = getattr(settings, "TOC_LIBRARY_TABLES", 1)

PendingTask, EndedTask = _models(0)
MODELS = [PendingTask, EndedTask]
for _number in range(1, TABLES):
    MODELS += _models(_number)
globals().update((one.__name__, one) for one in MODELS)
