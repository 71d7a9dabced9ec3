"""Error replies become errors that say what to do, and each kind of URL has a client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError

from kombu_toc import ConfigurationError, NotPermittedError, ServerError
from kombu_toc.client.connect import _KINDS
from kombu_toc.client.errors import is_temporary, server_of, translated
from kombu_toc.plugin import KINDS
from kombu_toc.scripts.call import commands_of, load, name_of

from ..support.cases import each


def pool(**more: Any) -> Any:
    where = {"host": "h", "port": 6379, "db": 20, "username": "ann"}
    return SimpleNamespace(connection_kwargs=where, prefix="app:toc:", **more)


@each("reply", [None, 7, b"OK", ResponseError("WRONGTYPE Operation"), []])
def test_a_reply_that_is_no_such_error_is_left_alone(reply: Any) -> None:
    assert translated(reply, pool()) is reply


@pytest.mark.versions
@each(
    "error",
    [
        ReadOnlyError("You can't write against a read only replica."),
        OutOfMemoryError("command not allowed"),
        ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        ResponseError("NOREPLICAS Not enough good replicas to write."),
        ResponseError("Error running script: user_script: OOM command not allowed"),
    ],
)
def test_what_passes_is_a_lost_connection_to_whoever_asked(error: ResponseError) -> None:
    """K7: callers retry as after a lost connection."""
    assert is_temporary(error)
    made = translated(error, pool())
    assert isinstance(made, ServerError) and isinstance(made, ConnectionError)
    assert made.__cause__ is error
    assert translated(made, pool()) is made


@pytest.mark.versions
def test_a_full_server_is_named_with_what_to_do() -> None:
    made = translated(OutOfMemoryError("command not allowed"), pool())
    assert "h:6379 is full (maxmemory)" in str(made)


def test_a_database_that_is_not_there_is_a_wrong_configuration() -> None:
    made = translated(ResponseError("DB index is out of range"), pool())
    assert isinstance(made, ConfigurationError)
    assert "h:6379 has no database 20" in str(made)


@pytest.mark.versions
@each(
    ("said", "rule"),
    [
        ("this user has no permissions to run the 'ZADD' command", r"ACL SETUSER ann \+zadd;"),
        ("No permissions to access a key", r"ACL SETUSER ann ~app:toc:\*;"),
        (f"ACL failure in script: f_{load('bury').sha} ...", r"run all commands of .*'bury'"),
    ],
)
def test_what_an_acl_refuses_is_told_with_the_rule_to_add(said: str, rule: str) -> None:
    made = translated(NoPermissionError(said), pool())
    assert isinstance(made, NotPermittedError)
    with pytest.raises(NotPermittedError, match=rule):
        raise made


@pytest.mark.versions
def test_a_server_is_named_by_its_socket_or_by_its_master() -> None:
    assert server_of(SimpleNamespace(connection_kwargs={"path": "/run/redis.sock"})) == (
        "/run/redis.sock"
    )
    assert server_of(pool(service_name="m", master_address=("h2", 7))) == "h2:7 (master 'm')"


@pytest.mark.versions
def test_each_kind_of_url_has_a_client() -> None:
    assert set(_KINDS) == set(KINDS)


def test_a_script_is_found_by_its_sha_with_the_commands_that_it_runs() -> None:
    script = load("due")
    assert name_of(script.sha) == script.name
    assert commands_of([script.name]) <= commands_of([script.name, "put"])
    assert {"hset", "zadd", "time"} <= commands_of(["put"])
    assert name_of("0" * 40) is None
