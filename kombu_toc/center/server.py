"""Checks that an ACL user may run the scripts; an error names the rule to add."""

from __future__ import annotations

from collections.abc import Iterable

from redis.exceptions import ResponseError

from ..client.errors import DOCUMENT, explained, is_refused
from ..errors import NotPermittedError
from ..scripts.call import ScriptCall, commands_of, load, texts
from .center import TimeoutCenter

# -- checks that an ACL user may run the scripts; an error names the rule to add

#: The scripts of whoever publishes, and what a consumer adds to them.
PRODUCERS = (
    *("admit", "bind", "bindings", "bound", "broadcast", "counts", "declare", "put"),
    "put_special",
)
CONSUMERS = (
    *("ack", "due", "elect", "extend", "hand_back", "pass_on", "pop", "present", "purge", "recall"),
    *(
        "bury",
        "recheck",
        "recur",
        "recurring",
        "mark",
        "reject",
        "release",
        "sweep",
        "upkeep",
        "use",
    ),
)


def check(center: TimeoutCenter, scripts: Iterable[str]) -> None:
    """Make sure that the scripts may run all their commands.

    Raises NotPermittedError, which names those that they may not.
    """
    wanted = sorted(commands_of(scripts))
    try:
        refused = center.runner.run(
            ScriptCall(load("allowed"), (center.keys.write_probe,), wanted, texts)
        )
    except ResponseError as exc:
        if is_refused(exc) and not isinstance(exc, NotPermittedError):
            raise explained(exc, center.client.connection_pool) from exc
        raise
    refused = [command for command in refused if command in wanted]
    if refused:
        names, rule = ", ".join(refused), " ".join(f"+{command}" for command in refused)
        user = center.client.connection_pool.connection_kwargs.get("username") or "default"
        raise NotPermittedError(
            f"the user {user!r} may not run {names}, without which messages could be lost: "
            f"ACL SETUSER {user} {rule}; {DOCUMENT}"
        )


# -- estimates how much memory topics take in Redis, from a bounded number of samples

#: Slots that are looked at, of all topics together.
SAMPLED = 512

#: Commands that leave together.
TOGETHER = 1000


def estimate_memory(
    center: TimeoutCenter, topics: Iterable[str], *, sampled: int = SAMPLED
) -> dict[str, int] | None:
    """Estimate how many bytes each topic's messages take in Redis: {topic: bytes}.

    sampled: how many slots are measured in all. If the topics have more, some slots stand for the
        others: the CRC spreads messages evenly. Redis itself estimates a large key from some of
        its members.

    Returns None if the server refuses ``MEMORY USAGE``.
    """
    names = list(topics)
    each = max(sampled // max(len(names), 1), 1)
    wanted: list[tuple[str, float, str]] = []
    for name in names:
        topic = center.registry.known(name) or center.registry.topic(name)
        step = max(-(-topic.slot_span // each), 1)
        slots = range(0, topic.slot_span, step)
        share = topic.slot_span / len(slots)
        wanted += [(name, share, key) for n in slots for key in topic.slot(n).all()]
    found = dict.fromkeys(names, 0.0)
    for start in range(0, len(wanted), TOGETHER):
        part = wanted[start : start + TOGETHER]
        with center.client.pipeline(transaction=False) as pipe:
            for _, _, key in part:
                pipe.memory_usage(key)
            replies = pipe.execute(raise_on_error=False)
        for (name, share, _), reply in zip(part, replies, strict=True):
            if isinstance(reply, Exception):  # an ACL user who may not ask
                return None
            found[name] += share * (reply or 0)
    return {name: round(size) for name, size in found.items()}
