"""Tasks of which there is one at a time: see docs/unique.md."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from kombu.utils import json

import kombu_toc

from ..compat import uniqueness


def unique(
    key: Any,
    until: str | float | None = None,
    conflict: str = "keep",
    at_most: float | None = None,
) -> dict[str, Any]:
    """Options of ``apply_async`` by which a task is sent only if its queue has none of this key:
    ``apply_async(args, **unique("invoice-42"))``.

    key: text, a whole number or a UUID
    until: how long the task that is sent has the key: ``"start"``, until a worker fetches it;
        ``"done"``, until it has ended; or for so many seconds, also if it has ended before.
        ``"done"`` unless given; with ``replace`` and ``push_back``, ``"start"``
    conflict: what is done if another task has the key: ``"keep"``, nothing is sent, and the
        AsyncResult of the other one is returned; ``"replace"``, the other one gets the new
        arguments and the new time, and keeps its id, of which the AsyncResult is returned;
        ``"push_back"``, the same, and its time only gets later; ``"raise"``, UniqueError. What has
        started cannot be replaced or pushed back: then UniqueError is raised
    at_most: with ``push_back``: seconds after the first was sent beyond which it is not pushed back

    Raises CompatError if this Celery lacks a name that is needed. Sending raises TraitError if an
    option makes no sense.
    """
    uniqueness.install()
    said = {"": key, "-until": until, "-conflict": conflict, "-at-most": at_most}
    return {f"x-unique{name}": value for name, value in said.items() if value is not None}


class Unique:
    """The attribute ``toc_unique`` of a task: each time it is sent, with :func:`unique`.

    key: computes the key from the arguments of the task; None: this one is not unique. Or a text,
        the same for all. Unless given, tasks with the same arguments have the same key. The name of
        the task and a colon are put before it
    until, conflict, at_most: as of :func:`unique`

    Raises CompatError as :func:`unique`.
    """

    def __init__(
        self,
        key: Callable[..., Any] | str | None = None,
        until: str | float | None = None,
        conflict: str = "keep",
        at_most: float | None = None,
    ) -> None:
        uniqueness.install()
        self.key = key
        self.until = until
        self.conflict = conflict
        self.at_most = at_most

    def __repr__(self) -> str:
        return f"<Unique: until={self.until!r} conflict={self.conflict!r}>"

    def options_for(self, task: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        """The options with which the task is sent with these arguments."""
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        if self.key is None:
            key: Any = _digest(task, args, kwargs)
        else:
            key = self.key(*args, **kwargs) if callable(self.key) else self.key
        if key is None:
            return {}
        return unique(f"{task.name}:{key}", self.until, self.conflict, self.at_most)


def _digest(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A text that tasks with the same arguments have in common."""
    try:
        bound = inspect.signature(task.run).bind(*args, **kwargs)
        bound.apply_defaults()
        said = dict(bound.arguments)
    except TypeError:  # it is sent with arguments that it does not take
        said = {"args": args, "kwargs": kwargs}
    try:
        text = json.dumps(said, sort_keys=True)
    except TypeError as exc:
        raise kombu_toc.TraitError(
            f"task {task.name}: its arguments make no unique key ({exc}); give toc_unique a key, a "
            "function of the arguments"
        ) from None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
