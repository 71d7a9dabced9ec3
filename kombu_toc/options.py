"""Options: what a URL's query and ``broker_transport_options`` may say; checks and defaults."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.connection import URL_QUERY_ARGUMENT_PARSERS

from .errors import ConfigurationError
from .scores import MAX_RETRIES
from .tls import read_requirement
from .topics import (
    DEFAULT_SLOTS,
    PRIORITY_STEPS,
    Declaration,
    Limits,
    check_slots,
    check_steps,
    check_visibility,
)


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ConfigurationError(f"{name} must be a number of seconds, not {value!r}")
    return seconds


def _positive_seconds(name: str, value: Any) -> float:
    seconds = _seconds(name, value)
    if seconds < 0.01:
        raise ConfigurationError(f"{name} must be at least 0.01 seconds, not {value!r}")
    return seconds


def _whole(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} must be a whole number, not {value!r}") from None


def _natural(name: str, value: Any) -> int:
    number = _whole(name, value)
    if number < 0:
        raise ConfigurationError(f"{name} must be a whole number from 0 up, not {value!r}")
    return number


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    try:
        return known[str(value).lower()]
    except KeyError:
        raise ConfigurationError(f"{name} must be true or false, not {value!r}") from None


def _text(name: str, value: Any) -> str:
    return str(value)


def _slots(name: str, value: Any) -> int:
    return check_slots("*", _whole(name, value))


def _steps(name: str, value: Any) -> tuple[int, ...]:
    return check_steps(value.split(",") if isinstance(value, str) else value)


def _topics(name: str, value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(v, Mapping) for v in value.values()):
        raise ConfigurationError(
            f"{name} must map a topic to its limits, such as {{'mail': {{'slots': 16}}}}, "
            f"not {value!r}"
        )
    for topic, limits in value.items():
        Declaration.of(topic, **limits)
    return {topic: dict(limits) for topic, limits in value.items()}


def _sentinel_kwargs(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{name} must map redis-py's options to values, such as {{'password': '...'}}"
        )
    for option in value:
        if option not in _REDIS and option not in ("ssl", *_IGNORED):
            near = difflib.get_close_matches(str(option), ["ssl", *_REDIS], n=1, cutoff=0.0)
            raise ConfigurationError(
                f"unknown option {option!r} in {name}; did you mean {near[0]!r}?"
            )
    return {k: v for k, v in value.items() if k not in _IGNORED}


@dataclass
class Settings:
    """The options of one connection, checked. Times are in seconds."""

    #: how long a delivered message may stay unacknowledged and unrenewed
    visibility_timeout: float = Limits().visibility
    #: what every key begins with, before ``toc_prefix``
    global_keyprefix: str = ""
    #: the priorities that are told apart, 0 first
    priority_steps: tuple[int, ...] = PRIORITY_STEPS
    #: what every key begins with
    toc_prefix: str = "toc:"
    #: slot count of topics that are declared without one; None leaves the default
    toc_slots: int | None = None
    #: redeliveries a message may have, in topics that are declared without a number
    toc_retries: int = MAX_RETRIES
    #: seconds a message waits after its first failed delivery, doubled with each further one
    toc_retry_backoff: float = Limits().retry_backoff
    #: the longest of these waits
    toc_retry_backoff_max: float = Limits().retry_backoff_max
    #: how long DeadQueue keeps a message
    toc_dead_age: float = Limits().dead_age
    #: how many messages a topic's DeadQueue keeps
    toc_dead_limit: int = Limits().dead_limit
    #: how many replicas must have a message before its publish returns
    toc_wait_replicas: int = 0
    #: how long a publish waits for them
    toc_wait_timeout: float = 1.0
    #: per topic: ``slots``, ``retries``, ``visibility``, ``retry_backoff``,
    #: ``retry_backoff_max``, ``dead_age``, ``dead_limit``
    toc_topics: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: how long before its action time a message may be fetched (and then held) by an idle worker
    toc_lookahead: float = 0.020
    #: how long a message must have been due before a worker with no free process queues it
    toc_queue_after: float = 0.005
    #: how often an idle consumer looks into all slots, whatever was announced
    toc_poll_interval: float = 1.0
    #: whether messages that will wait are deflated
    toc_deflate: bool = True
    #: whether a revoke takes the message out of the broker (Celery's part, not the transport's)
    toc_revoke_removes: bool = True
    #: about how many broadcast messages an exchange keeps for consumers that reconnect
    toc_fanout_length: int = 10_000
    #: how long an exclusive, auto-delete or expiring queue outlives its last refresh, at least
    toc_stale_after: float = 60.0
    #: whether what happens to messages, and how late, is counted
    toc_metrics: bool = True
    #: by which the sentinels know the server
    master_name: str = ""
    #: how many others a sentinel must know of for its word to count
    min_other_sentinels: int = 0
    #: arguments for redis-py's connections to the sentinels; ``ssl`` as well
    sentinel_kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    #: whether the server speaks TLS; ``rediss`` says so too
    ssl: bool = False
    #: whether the sentinels do
    sentinel_ssl: bool = False
    #: arguments for redis-py's connections
    connection: dict[str, Any] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return self.global_keyprefix + self.toc_prefix

    @property
    def slots(self) -> int:
        return self.toc_slots or DEFAULT_SLOTS

    @property
    def limits(self) -> Limits:
        """What holds for topics whose declarations do not say."""
        return Limits(
            self.visibility_timeout,
            self.toc_retry_backoff,
            self.toc_retry_backoff_max,
            self.toc_dead_age,
            self.toc_dead_limit,
        )


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "visibility_timeout": check_visibility,
    "global_keyprefix": _text,
    "priority_steps": _steps,
    "toc_prefix": _text,
    "toc_slots": _slots,
    "toc_retries": _whole,
    "toc_retry_backoff": _seconds,
    "toc_retry_backoff_max": _seconds,
    "toc_dead_age": _seconds,
    "toc_dead_limit": _whole,
    "toc_wait_replicas": _natural,
    "toc_wait_timeout": _positive_seconds,
    "toc_topics": _topics,
    "toc_lookahead": _seconds,
    "toc_queue_after": _seconds,
    "toc_poll_interval": _positive_seconds,
    "toc_deflate": _flag,
    "toc_revoke_removes": _flag,
    "toc_fanout_length": _whole,
    "toc_stale_after": _positive_seconds,
    "toc_metrics": _flag,
    "master_name": _text,
    "min_other_sentinels": _natural,
    "sentinel_kwargs": _sentinel_kwargs,
    "ssl": _flag,
    "sentinel_ssl": _flag,
}

#: What a URL cannot say.
_NOT_IN_URL = frozenset(("toc_topics", "sentinel_kwargs"))

#: Of Kombu's options for Sentinel, where None means nothing is said.
_KOMBUS = frozenset(("master_name", "min_other_sentinels", "sentinel_kwargs"))

#: What only a URL says: elsewhere it is ``broker_use_ssl``, or others' business.
_ONLY_IN_URL = frozenset(("ssl",))

#: Options of Kombu's own that a URL may carry; they are for Kombu, not for us.
_KOMBU = frozenset(
    (
        "max_retries",
        "interval_start",
        "interval_step",
        "interval_max",
        "connect_retries_timeout",
        "queue_order_strategy",
        "virtual_host",
    )
)


def _arguments(*classes: type) -> frozenset[str]:
    names: set[str] = set()
    for cls in classes:
        for parent in cls.__mro__[:-1]:
            names.update(inspect.signature(parent.__init__).parameters)
    return frozenset(n for n in names if not n.startswith("_")) - {"self", "args", "kwargs"}


#: Arguments that redis-py's connections and pools take.
_REDIS = _arguments(
    redis.Connection,
    redis.SSLConnection,
    redis.UnixDomainSocketConnection,
    redis.ConnectionPool,
) - {
    "connection_class",
    "decode_responses",
    "encoding",
    "encoding_errors",
    "parser_class",
    "protocol",
    "redis_connect_func",
    "retry",
    "retry_on_error",
    "retry_on_timeout",
}

#: Accepted and without effect: a command that may have run is never sent again blindly.
_IGNORED = frozenset(("retry_on_timeout",))


def read(query: Mapping[str, str], options: Mapping[str, Any]) -> Settings:
    """Check and merge a URL's query with the transport options; the query goes first.

    Raises ConfigurationError for an option that is not known, naming it and the nearest one
    that is: any option of a URL, and of the transport options those that start with ``toc_``.
    """
    settings = Settings()
    for name, value in options.items():
        if name in _CHECKS and name not in _ONLY_IN_URL:
            if value is None and name in _KOMBUS:
                continue
            setattr(settings, name, _CHECKS[name](name, value))
        elif name in _REDIS:
            settings.connection[name] = value
        elif name.startswith("toc_"):
            raise _unknown(name, "broker_transport_options")
    for name, value in query.items():
        if name in _CHECKS and name not in _NOT_IN_URL:
            setattr(settings, name, _CHECKS[name](name, value))
        elif name in _REDIS:
            parser = URL_QUERY_ARGUMENT_PARSERS.get(name)
            if name == "ssl_cert_reqs":  # Kombu spells it as Python's ssl module does
                value = read_requirement(value)
            try:
                settings.connection[name] = parser(value) if parser else value
            except (TypeError, ValueError):
                raise ConfigurationError(f"{name} cannot be {value!r}") from None
        elif name in _NOT_IN_URL:
            raise ConfigurationError(
                f"{name} has no form that fits the URL: put it in broker_transport_options"
            )
        elif name not in _KOMBU and name not in _IGNORED:
            raise _unknown(name, "the URL")
    Declaration.of("*", retries=settings.toc_retries)
    settings.limits.checked("toc options")
    return settings


def _unknown(name: str, place: str) -> ConfigurationError:
    known = sorted({*_CHECKS, *_REDIS})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return ConfigurationError(f"unknown option {name!r} in {place}; did you mean {near[0]!r}?")
