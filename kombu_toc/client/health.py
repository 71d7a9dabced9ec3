"""Checks of a server: can it be used, may it lose messages, how much memory has it left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    InvalidResponse,
    NoPermissionError,
    ResponseError,
)

from ..errors import ConfigurationError, ServerError
from .faults import server_of

#: The oldest version that has all commands that are needed.
OLDEST = (6, 2)


#: What a managed server raises that hides its configuration; and a node of a Cluster that is away,
#: while the others can be asked.
_HIDDEN = (ResponseError, NoPermissionError)
_AWAY = (redis.ConnectionError, redis.TimeoutError, OSError)


def _speaks_tls(client: redis.Redis) -> bool:
    return issubclass(client.connection_pool.connection_class, redis.SSLConnection)


def check_server(client: redis.Redis) -> dict[str, Any]:
    """Make sure that a usable Redis or Valkey answers; return its ``INFO server``.

    Raises ServerError, or redis-py's own AuthenticationError and ConnectionError.
    """
    client_for = getattr(client, "client_for", None)  # a Cluster's client has it
    cluster = client_for is not None
    where = server_of((client_for() if client_for else client).connection_pool)
    try:
        info = client.info("server")
    except (AuthenticationError, AuthorizationError):
        raise
    except redis.ConnectionError as exc:
        if not _speaks_tls(client) and re.search("closed|reset", str(exc)):
            raise ServerError(
                f"{where} closes the connection ({exc}): if it speaks TLS there, use "
                "toc+rediss://, or toc+sentinel://...&ssl=true"
            ) from exc
        raise
    except NoPermissionError:
        client.ping()  # an ACL user without INFO; the scripts will show whether the server will do
        return {}
    except ConfigurationError:
        raise
    except (InvalidResponse, ResponseError, ValueError, IndexError, AttributeError) as exc:
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
    warnings: dict[str, None] = {}
    for node in client.primaries() if hasattr(client, "primaries") else [client]:
        try:
            for warning in _durability_warnings(node):
                warnings[warning] = None
        except _HIDDEN:
            pass
        except _AWAY:
            if not hasattr(client, "primaries"):
                raise
    return list(warnings)


def outage_warnings(client: redis.Redis) -> list[str]:
    """Settings of a Cluster with which one node that is away stops the others too, each with the
    setting to use instead.

    Empty if there are none, if the server is no Cluster, or if it does not show its configuration.
    """
    name = "cluster-require-full-coverage"
    for node in client.primaries() if hasattr(client, "primaries") else ():
        with suppress(*_HIDDEN, *_AWAY):
            if node.config_get(name).get(name) == "yes":
                return [
                    f"while one primary of the Cluster is away and no replica has taken over, all "
                    f"other nodes refuse commands, too ({name} yes, Redis's default); set {name} "
                    "no on every node"
                ]
    return []


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
    found = []
    for node in client.primaries() if hasattr(client, "primaries") else [client]:
        try:
            info = node.info("memory")
        except _HIDDEN:
            return []
        except _AWAY:
            if not hasattr(client, "primaries"):
                raise
            continue
        used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
        found.append(Memory(server_of(node.connection_pool), used, most))
    return found
