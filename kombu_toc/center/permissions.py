"""Checks that an ACL user may run the scripts; an error names the rule to add."""

from __future__ import annotations

from collections.abc import Iterable

from redis.exceptions import ResponseError

from ..client.errors import DOCUMENT, explained, is_refused
from ..errors import NotPermittedError
from ..scripts.call import ScriptCall, commands_of, load, texts
from .center import TimeoutCenter

#: The scripts of whoever publishes, and what a consumer adds to them.
PRODUCERS = ("admit", "bind", "bindings", "bound", "broadcast", "counts", "declare", "put")
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
        refused = center.run(ScriptCall(load("allowed"), (center.keys.write_probe,), wanted, texts))
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
