"""ACL users: what one lacks is told with the rule to add."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoPermissionError, ResponseError

from ..errors import NotPermittedError
from ..scripts.call import ScriptCall, texts
from ..scripts.loader import load

if TYPE_CHECKING:
    from .center import TimeoutCenter

#: The scripts of whoever publishes, and what a consumer adds to them.
PRODUCERS = ("admit", "bind", "bindings", "bound", "broadcast", "counts", "declare", "put")
CONSUMERS = (
    *("ack", "due", "elect", "extend", "hand_back", "pop", "present", "purge", "recall"),
    *("reject", "release", "sweep", "upkeep"),
)

#: Where all is written.
DOCUMENT = "docs/security.md has the whole rule"

_COMMAND = re.compile(r"run the '([^']+)' command")
_SHA = re.compile(r"\b(?:f_|script: )([0-9a-f]{40})\b")


def commands_of(scripts: Iterable[str]) -> set[str]:
    """The commands that these scripts run, in lower case."""
    found: set[str] = set()
    for name in scripts:
        found.update(re.findall(r"redis\.p?call\(\s*'(\w+)'", load(name).text))
    return {name.lower() for name in found}


def is_refused(exc: BaseException) -> bool:
    """Whether the server has refused it to this user."""
    if isinstance(exc, NoPermissionError):
        return True
    # Within a script it is an ordinary error, and Redis 6.2 and 7.0 do not name the command.
    said = str(exc)
    return "ACL failure in script" in said or "The user executing the script can't" in said


def explained(exc: BaseException, pool: Any) -> NotPermittedError:
    """An error that says which rule the user lacks."""
    said = str(exc)
    arguments = getattr(pool, "connection_kwargs", {})
    user = arguments.get("username")
    provider = arguments.get("credential_provider")
    if provider is not None:
        named = provider.get_credentials()
        user = named[0] if len(named) > 1 else None
    user = user or "default"
    if found := _COMMAND.search(said):
        what, rule = f"run {found[1]!r}", f"+{found[1].lower()}"
    elif "key" in said:
        prefix = getattr(pool, "prefix", "toc:")
        what, rule = f"use keys that begin with {prefix!r}", f"~{prefix}*"
    elif (found := _SHA.search(said)) and (name := _script(found[1])):
        commands = sorted(commands_of([name]))
        what = f"run all commands of the script {name!r}"
        rule = " ".join(f"+{command}" for command in commands)
    else:
        what, rule = "do this", "..."
    error = NotPermittedError(
        f"the user {user!r} may not {what} ({said}): ACL SETUSER {user} {rule}; {DOCUMENT}"
    )
    error.__cause__ = exc
    return error


def _script(sha: str) -> str | None:
    for file in files("kombu_toc.scripts").iterdir():
        name = file.name.removesuffix(".lua")
        if file.name.endswith(".lua") and load(name).sha == sha:
            return name
    return None


def check(center: TimeoutCenter, scripts: Iterable[str]) -> None:
    """Make sure that the scripts may run all their commands.

    Raises NotPermittedError, which names those that they may not.
    """
    wanted = sorted(commands_of(scripts))
    try:
        refused = center.run(ScriptCall(load("allowed"), (center.keys.nothing,), wanted, texts))
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
