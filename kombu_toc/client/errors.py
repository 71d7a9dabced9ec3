"""Redis ACLs: a refusal becomes an error that names the rule that the user lacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import redis
from redis import exceptions

from ..errors import ConfigurationError, NotPermittedError, ServerError
from ..scripts.call import commands_of, name_of

T = TypeVar("T")
Error = TypeVar("Error", bound=BaseException)

#: What a broken connection raises.
BROKEN = (redis.ConnectionError, redis.TimeoutError, OSError)

# -- redis ACLs

#: The end of every such error.
DOCUMENT = "docs/security.md has the whole rule"

_COMMAND = re.compile(r"run the '([^']+)' command")
_SHA = re.compile(r"\b(?:f_|script: )([0-9a-f]{40})\b")


def is_refused(exc: BaseException) -> bool:
    """Whether an error reply means that an ACL forbids the command to this user."""
    if isinstance(exc, exceptions.NoPermissionError):
        return True
    # A script gets an ordinary error, and Redis 6.2 and 7.0 do not name the command in it.
    said = str(exc)
    return "ACL failure in script" in said or "The user executing the script can't" in said


def caused(error: Error, by: BaseException) -> Error:
    """The error, caused by another, where it is returned and not raised."""
    error.__cause__ = by
    return error


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
    return caused(
        NotPermittedError(
            f"the user {user!r} may not {what} ({said}): ACL SETUSER {user} {rule}; {DOCUMENT}"
        ),
        exc,
    )


# -- error replies of a server, translated into errors that say what to do

#: How a server refuses the number of a database.
_NO_DATABASE = re.compile(r"DB index is out of range|invalid DB index", re.IGNORECASE)

#: Temporary errors: they pass, or an operator ends them. redis-py strips the first word of errors
#: that it has a class for, and Redis 6.2 puts the script's name before the errors of a script.
_NOT_NOW = (
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
)
_NOT_NOW_WORDS = re.compile(
    r"\b(READONLY|MISCONF|NOREPLICAS|OOM|LOADING|MASTERDOWN|CLUSTERDOWN|BUSY|UNBLOCKED)\b"
)
_DEMOTED = re.compile(r"\bREADONLY\b")


def is_temporary(exc: BaseException) -> bool:
    """Whether an error reply means that the server cannot run the command for now."""
    return isinstance(exc, _NOT_NOW) or _NOT_NOW_WORDS.search(str(exc)) is not None


def is_demoted(exc: BaseException) -> bool:
    """Whether an error reply means that the server is a replica now."""
    return isinstance(exc, exceptions.ReadOnlyError) or _DEMOTED.search(str(exc)) is not None


def translated(reply: Any, pool: Any) -> Any:
    """A reply as it is, or a ServerError caused by it if it is an error that passes or that an ACL
    rule cures."""
    if not isinstance(reply, exceptions.ResponseError) or isinstance(reply, ServerError):
        return reply
    if is_refused(reply):
        return explained(reply, pool)
    if _NO_DATABASE.search(str(reply)):
        text = (
            f"{server_of(pool)} has no database {pool.connection_kwargs.get('db')}; use a number "
            "that its setting 'databases' allows: 0 to 15 unless it is set"
        )
        return caused(ConfigurationError(text), reply)
    if not is_temporary(reply):
        told = str(reply)
        return reply if len(told) > 2 else type(reply)(f"the server's error says only {told!r}")
    return caused(ServerError(refusal(reply, pool)), reply)


def refusal(exc: BaseException, pool: Any) -> str:
    """The text of the error for a temporary refusal."""
    if isinstance(exc, exceptions.OutOfMemoryError) or re.search(r"\bOOM\b", str(exc)):
        return (
            f"{server_of(pool)} is full (maxmemory), and nothing was kept. Let workers drain it, "
            f"which they do all the same, or raise its maxmemory; then try again: {exc}"
        )
    return f"Redis refused a command: {exc}"


def server_of(pool: Any) -> str:
    """Name the server of a pool, for an error: host and port, or the path of its socket."""
    if name := getattr(pool, "service_name", None):
        host, port = pool.master_address or ("?", "?")
        return f"{host}:{port} (master {name!r})"
    where = pool.connection_kwargs
    return where.get("path") or f"{where.get('host')}:{where.get('port')}"


# -- checks of a server

#: The oldest version that has all commands that are needed.
OLDEST = (6, 2)


#: What a managed server raises that hides its configuration.
_HIDDEN = (exceptions.ResponseError, exceptions.NoPermissionError)


def check_server(client: redis.Redis) -> dict[str, Any]:
    """Make sure that a usable Redis or Valkey answers; return its ``INFO server``.

    Raises ServerError, or redis-py's own AuthenticationError and ConnectionError.
    """
    client_for = getattr(client, "client_for", None)  # a Cluster's client has it
    cluster = client_for is not None
    where = server_of((client_for() if client_for else client).connection_pool)
    try:
        info = client.info("server")
    except (exceptions.AuthenticationError, exceptions.AuthorizationError, ConfigurationError):
        raise
    except redis.ConnectionError as exc:
        is_tls = issubclass(client.connection_pool.connection_class, redis.SSLConnection)
        if not is_tls and re.search("closed|reset", str(exc)):
            raise ServerError(
                f"{where} closes the connection ({exc}): if it speaks TLS there, use "
                "toc+rediss://, or toc+sentinel://...&ssl=true"
            ) from exc
        raise
    except exceptions.NoPermissionError:
        client.ping()  # an ACL user without INFO; the scripts will show whether the server will do
        return {}
    except (
        exceptions.InvalidResponse,
        exceptions.ResponseError,
        ValueError,
        IndexError,
        AttributeError,
    ) as exc:
        hint = ""
        if "unknown command" in str(exc).lower():
            hint = f"; if it is a sentinel, use toc+sentinel://{where}/0?master_name=..."
        raise ServerError(
            f"{where} does not answer as a Redis or Valkey server: {exc}{hint}"
        ) from exc
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):
        raise ServerError(
            f"{where} is a sentinel and not a server: use "
            f"toc+sentinel://{where}/0?master_name=..., with the name that it watches it by"
        )
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info.get("redis_version") or "")
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not numbers:
        raise ServerError(f"{where} does not answer as a Redis or Valkey server")
    if numbers < OLDEST:
        raise ServerError(
            f"{where} runs {name} {version}; 6.2 is the oldest that will do: upgrade it"
        )
    if not cluster and "cluster" in (info.get("redis_mode"), info.get("server_mode")):
        raise ServerError(
            f"{where} is a node of a Redis Cluster; use toc+cluster://{where}, and name more of "
            "its nodes, separated by commas"
        )
    return info


def durability_warnings(client: redis.Redis) -> list[str]:
    """Settings of a server that may lose messages, each with the setting to use instead.

    Empty if there are none, or if the server does not show its configuration. Source: the Redis
    manual on key eviction and on persistence.
    """
    return list(dict.fromkeys(_of_nodes(client, _durability_warnings)))


def _of_nodes(client: redis.Redis, read: Callable[[redis.Redis], Iterator[T]]) -> Iterator[T]:
    """What is read of a server, or of each node of a Cluster that answers and hides nothing."""
    nodes = getattr(client, "primaries", None)
    for node in nodes() if nodes else [client]:
        try:
            yield from read(node)
        except _HIDDEN:
            pass
        except BROKEN:
            if nodes is None:
                raise


def outage_warnings(client: redis.Redis) -> list[str]:
    """Settings of a Cluster with which one node that is away stops the others too, each with the
    setting to use instead.

    Empty if there are none, if the server is no Cluster, or if it does not show its configuration.
    """
    if not hasattr(client, "primaries"):
        return []
    return list(dict.fromkeys(_of_nodes(client, _outage_warnings)))


def _outage_warnings(node: redis.Redis) -> Iterator[str]:
    name = "cluster-require-full-coverage"
    if node.config_get(name).get(name) == "yes":
        yield (
            "while one primary of the Cluster is away and no replica has taken over, all other "
            f"nodes refuse commands, too ({name} yes, Redis's default); set {name} no on every node"
        )


def _durability_warnings(client: redis.Redis) -> Iterator[str]:
    memory, persistence = client.info("memory"), client.info("persistence")
    policy = memory.get("maxmemory_policy", "noeviction")
    if memory.get("maxmemory") and policy != "noeviction":
        yield (
            f"Redis evicts keys when its memory is full (maxmemory-policy {policy}): tasks "
            "may vanish; set maxmemory-policy noeviction"
        )
    if persistence.get("aof_enabled"):
        return
    rules = str(client.config_get("save").get("save") or "")
    if not rules:
        yield "Redis has no persistence: all tasks are lost when it restarts; set appendonly yes"
        return
    # A rule is: seconds, changed keys. A snapshot is taken when both are reached.
    numbers = [int(number) for number in rules.split()]
    few, seconds = min(zip(numbers[1::2], numbers[::2], strict=True))
    within = f" in the {_minutes(seconds)} before" if few == 1 else " since the last one"
    yield (
        f"Redis writes snapshots only (save {rules}): a crash can lose all tasks that were sent"
        f"{within}; set appendonly yes"
    )


def _minutes(seconds: int) -> str:
    return f"{seconds} seconds" if seconds < 120 else f"{round(seconds / 60)} minutes"


class Memory(NamedTuple):
    """How much memory a server uses."""

    server: str  #: host and port, or its socket
    used: int  #: bytes
    most: int  #: bytes (``maxmemory``); 0 without a bound


def read_memory(client: redis.Redis) -> list[Memory]:
    """The memory of the server, or of each node of a Cluster that has slots and answers. Empty if
    the user has no permission to ask."""
    return list(_of_nodes(client, _memory))


def _memory(node: redis.Redis) -> Iterator[Memory]:
    info = node.info("memory")
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    yield Memory(server_of(node.connection_pool), used, most)
