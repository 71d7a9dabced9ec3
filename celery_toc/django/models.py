"""The tables of the task library as models that only read.

A library that has several tables of each kind (``toc_library_tables``) needs the same number as
``TOC_LIBRARY_TABLES`` in Django's settings: the models of the others are ``PendingTask1``,
``EndedTask1`` and so on.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib.admin import display
from django.db import NotSupportedError, models

from ..schedules.rules import to_us, utc


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
        """Those with an action time from `since` on, and before `until`; without a zone, each is in
        this machine's."""
        found = self
        if since is not None:
            found = found.filter(action_us__gte=to_us(since.astimezone()))
        if until is not None:
            found = found.filter(action_us__lt=to_us(until.astimezone()))
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
    @display(description="due", ordering="action_us")
    def due(self) -> datetime | None:
        """When it is to run."""
        return utc(self.action_us)

    @property
    @display(description="sent", ordering="created_us")
    def created(self) -> datetime | None:
        """When it was sent."""
        return utc(self.created_us)

    @property
    @display(description="changed", ordering="modified_us")
    def modified(self) -> datetime | None:
        """When something has become of it last."""
        return utc(self.modified_us)


class Pending(Task):
    """A task that has not ended."""

    objects = PendingManager()
    place = models.SmallIntegerField(choices=Place.choices)
    priority = models.SmallIntegerField()

    class Meta(Task.Meta):
        abstract = True
        # As an index has it: a page of ten million rows costs what a page of ten costs.
        ordering = ("place", "action_us", "id")


class Ended(Task):
    """A task that has ended."""

    day = models.BigIntegerField(help_text="on which it has ended, since the epoch")
    KEY = (*Task.KEY, "day")

    class Meta(Task.Meta):
        abstract = True
        # What has failed before what is done, the latest first. An index has them so; of a table
        # with partitions, no index has one more column.
        ordering = ("-status", "-action_us")


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

    def made(base: type[Task], table: str, name: str) -> type[Task]:
        meta = {
            "db_table": f"toc_{table}_{number}",
            "verbose_name": f"{name} task{shown}",
            "verbose_name_plural": f"{name} tasks{shown}",
            "abstract": False,
        }
        values = {"__module__": __name__, "Meta": type("Meta", (base.Meta,), meta)}
        return type(f"{base.__name__}Task{which}", (base,), {**values, "__doc__": base.__doc__})

    return made(Pending, "pending", "pending"), made(Ended, "history", "ended")


#: How many tables of each kind there are.
TABLES = getattr(settings, "TOC_LIBRARY_TABLES", 1)

PendingTask, EndedTask = _models(0)
MODELS = [PendingTask, EndedTask]
for _number in range(1, TABLES):
    MODELS += _models(_number)
globals().update((one.__name__, one) for one in MODELS)
