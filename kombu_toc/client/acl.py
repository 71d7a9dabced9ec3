"""Redis ACLs: a refusal becomes an error that names the rule that the user lacks."""

from __future__ import annotations

import re
from typing import Any

from redis.exceptions import NoPermissionError

from ..errors import NotPermittedError
from ..scripts.call import commands_of, name_of

#: The end of every such error.
DOCUMENT = "docs/security.md has the whole rule"

_COMMAND = re.compile(r"run the '([^']+)' command")
_SHA = re.compile(r"\b(?:f_|script: )([0-9a-f]{40})\b")


def is_refused(exc: BaseException) -> bool:
    """Whether an error reply means that an ACL forbids the command to this user."""
    if isinstance(exc, NoPermissionError):
        return True
    # A script gets an ordinary error, and Redis 6.2 and 7.0 do not name the command in it.
    said = str(exc)
    return "ACL failure in script" in said or "The user executing the script can't" in said


def explained(exc: BaseException, pool: Any) -> NotPermittedError:
    """The error that names the rule to add."""
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
    elif (found := _SHA.search(said)) and (name := name_of(found[1])):
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
