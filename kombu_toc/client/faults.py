"""Error replies of a server, translated into errors that say what to do."""

from __future__ import annotations

import re
from typing import Any

from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from ..errors import ConfigurationError, ServerError
from .acl import explained, is_refused

#: How a server refuses the number of a database.
_NO_DATABASE = re.compile(r"DB index is out of range|invalid DB index", re.IGNORECASE)

#: Temporary errors: they pass, or an operator ends them. redis-py strips the first word of errors
#: that it has a class for, and Redis 6.2 puts the script's name before the errors of a script.
_NOT_NOW = (ReadOnlyError, OutOfMemoryError, MasterDownError, ClusterDownError)
_NOT_NOW_WORDS = re.compile(
    r"\b(READONLY|MISCONF|NOREPLICAS|OOM|LOADING|MASTERDOWN|CLUSTERDOWN|BUSY|UNBLOCKED)\b"
)
_DEMOTED = re.compile(r"\bREADONLY\b")


def is_temporary(exc: BaseException) -> bool:
    """Whether an error reply means that the server cannot run the command for now."""
    return isinstance(exc, _NOT_NOW) or _NOT_NOW_WORDS.search(str(exc)) is not None


def is_demoted(exc: BaseException) -> bool:
    """Whether an error reply means that the server is a replica now."""
    return isinstance(exc, ReadOnlyError) or _DEMOTED.search(str(exc)) is not None


def translated(reply: Any, pool: Any) -> Any:
    """A reply as it is, or a ServerError caused by it if it is an error that passes or that an ACL
    rule cures."""
    if not isinstance(reply, ResponseError) or isinstance(reply, ServerError):
        return reply
    if is_refused(reply):
        return explained(reply, pool)
    if _NO_DATABASE.search(str(reply)):
        return _no_database(reply, pool)
    if not is_temporary(reply):
        return reply
    error = ServerError(refusal(reply, pool))
    error.__cause__ = reply
    return error


def refusal(exc: BaseException, pool: Any) -> str:
    """The text of the error for a temporary refusal."""
    if isinstance(exc, OutOfMemoryError) or re.search(r"\bOOM\b", str(exc)):
        return (
            f"{server_of(pool)} is full (maxmemory), and nothing was kept. Let workers drain it, "
            f"which they do all the same, or raise its maxmemory; then try again: {exc}"
        )
    return f"Redis refused a command: {exc}"


def _no_database(exc: Exception, pool: Any) -> ConfigurationError:
    error = ConfigurationError(
        f"{server_of(pool)} has no database {pool.connection_kwargs.get('db')}; use a number that "
        "its setting 'databases' allows: 0 to 15 unless it is set"
    )
    error.__cause__ = exc
    return error


def server_of(pool: Any) -> str:
    """Name the server of a pool, for an error: host and port, or the path of its socket."""
    if name := getattr(pool, "service_name", None):
        host, port = pool.master_address or ("?", "?")
        return f"{host}:{port} (master {name!r})"
    where = pool.connection_kwargs
    return where.get("path") or f"{where.get('host')}:{where.get('port')}"
