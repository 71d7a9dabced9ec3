"""Unique keys of published messages: where they are read, and what their sender is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..errors import KeptError
from ..model.message import KEEP_EARLIER, UNIQUE, Claim, Unique, claim_of

#: The headers of a message with a unique key, or properties. Celery sends headers along with a
#: retry, and no properties.
UNTIL, CONFLICT, AT_MOST = "x-unique-until", "x-unique-conflict", "x-unique-at-most"


class UniqueAnswer:
    """What became of a message of this id."""

    __slots__ = ("id",)

    def __init__(self, id: str) -> None:
        self.id = id  #: the id that it has now: of the one whose place it has taken


_awaited: ContextVar[UniqueAnswer | None] = ContextVar("awaited", default=None)


@contextmanager
def unique_answer(id: str) -> Iterator[UniqueAnswer]:
    """Within the block, the sender of the message of this id learns what became of it: its id if it
    takes the place of another one, and KeptError if it is not sent because there is another one,
    which nobody is told otherwise."""
    answer = UniqueAnswer(id)
    token = _awaited.set(answer)
    try:
        yield answer
    finally:
        _awaited.reset(token)


def say_kept(id: str, other: str) -> None:
    """The message of this id is not sent, because there is the other. Raises KeptError if its
    sender wants to know."""
    answer = _awaited.get()
    if answer is not None and answer.id == id:
        raise KeptError(other)


def say_replaced(id: str, other: str) -> None:
    """The message of this id has the place of the other, and its id."""
    answer = _awaited.get()
    if answer is not None and answer.id == id:
        answer.id = other


def is_unique(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
    """Whether a message has a unique key."""
    return UNIQUE in headers or UNIQUE in properties


def take_claim(message: dict[str, Any], id: str, basis: str | None) -> Claim:
    """The claim of a message with a unique key; what says so is written into its headers.

    basis: what picks its slot if it is not the unique key

    Raises TraitError for what makes no sense.
    """
    headers, properties = message.get("headers") or {}, message["properties"]
    said = properties if UNIQUE in properties else headers
    found = {name: said.get(name) for name in (UNIQUE, UNTIL, CONFLICT, AT_MOST)}
    if said is properties:
        others = {n: v for n, v in headers.items() if n not in found}
        message["headers"] = others | {n: v for n, v in found.items() if v is not None}
        message["properties"] = {n: v for n, v in properties.items() if n not in found}
    unique = Unique(found[UNIQUE], found[UNTIL], found[CONFLICT] or KEEP_EARLIER, found[AT_MOST])
    return claim_of(f"message {id}", unique, basis, "x-unique-")


def under(message: dict[str, Any], id: str) -> dict[str, Any]:
    """The message with another id."""
    headers, properties = dict(message["headers"]), dict(message["properties"])
    before = headers.get("id")
    headers["id"] = id
    if headers.get("root_id") == before:
        headers["root_id"] = id
    if properties.get("correlation_id") == before:
        properties["correlation_id"] = id
    return {**message, "headers": headers, "properties": properties}
