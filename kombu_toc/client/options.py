"""Broker URLs, and options of a connection, from a URL's query and ``broker_transport_options``:
rows, checks and defaults."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import redis
from redis.connection import URL_QUERY_ARGUMENT_PARSERS

from ..errors import ConfigurationError
from ..model.failures import FailureBounds
from ..model.limits import LIMITS, MAX_SLOTS, Flag, Limits, Number, check_steps
from ..model.scores import MAX_RETRIES
from ..model.topic import Declaration
from ..plugin import KINDS
from .embedded import EmbeddedServer

# -- URLs of databases, whose passwords are shown nowhere

#: What stands for a library beside the data of the embedded server.
BESIDE = "on"

#: What begins the name of an environment variable that has the URL.
FROM_ENVIRONMENT = "env:"

#: A password ends at the last @ of all: whatever is masked in vain is no harm. Without an @, what
#: stands where a port does is one only if it has digits.
_LOGIN = re.compile(r"^([a-z0-9_+]+://[^:/@]*):(.*)@", re.IGNORECASE | re.DOTALL)
_NO_PORT = re.compile(
    r"^([a-z0-9_+]+://[^:/@?\[]+):(?!\d+(?:[/?,]|$))([^@]+)$", re.IGNORECASE | re.DOTALL
)
_SECRET_QUERY = re.compile(r"([?&][^=&]*(?:pass|secret|token|key)[^=&]*=)([^&]*)", re.IGNORECASE)
_SCHEME = re.compile(r"^([a-z0-9_+]+)://", re.IGNORECASE)

#: Characters of a secret that is looked for in what drivers say: a shorter one would be found in
#: ordinary words, which would tell it.
SHORTEST = 4

#: What SQLAlchemy is told for the schemes that people write.
_DRIVERS = {
    "sqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mysql+pymysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "mariadb+pymysql": "mariadb+pymysql",
}

#: masked URL -> what it stands for. Kombu shows a connection's options to whoever asks a worker
#: (``celery inspect stats``), so these hold the masked one.
_meant: dict[str, str] = {}


@dataclass(frozen=True, repr=False, slots=True)
class DatabaseURL:
    """The URL of a database. Its text and its repr have no password."""

    _url: str

    def reveal(self) -> str:
        """The URL as SQLAlchemy takes it, with the password."""
        scheme, separator, rest = self._url.partition("://")
        return f"{_DRIVERS[scheme.lower()]}{separator}{rest}"

    @property
    def is_sqlite(self) -> bool:
        return self._url.lower().startswith("sqlite:")

    @property
    def is_beside(self) -> bool:
        """Whether it is the file beside the data of the embedded server."""
        return self._url == BESIDE

    @property
    def has_secret(self) -> bool:
        return masked(self._url) != self._url

    def scrub(self, text: str) -> str:
        """A text that a driver has made, without the secrets of this URL."""
        said = [match[2] for match in _LOGIN.finditer(self._url)]
        said += [match[2] for match in _SECRET_QUERY.finditer(self._url)]
        secrets = {one for secret in said for one in (secret, unquote(secret))}
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= SHORTEST:
                text = text.replace(secret, "**")
        return text

    def __str__(self) -> str:
        return masked(self._url)

    def __repr__(self) -> str:
        return f"DatabaseURL({str(self)!r})"


def masked(url: str) -> str:
    """A database's URL without its secrets."""
    return _SECRET_QUERY.sub(r"\1**", _NO_PORT.sub(r"\1:**", _LOGIN.sub(r"\1:**@", url)))


def read_databases(name: str, value: Any) -> tuple[DatabaseURL, ...]:
    """The databases that an option names: a URL, or a list of them; none for an empty text.

    Raises ConfigurationError, which shows no password.
    """
    if not value:
        return ()
    given = value if isinstance(value, (list, tuple)) else (value,)
    found = tuple(_read(name, one) for one in given)
    if len(set(found)) < len(found):
        raise ConfigurationError(f"{name} names a database twice: each is a shard of its own")
    if len(found) > 1 and any(one.is_beside for one in found):
        raise ConfigurationError(f"{name} is {BESIDE!r} or a list of URLs, not both")
    return found


def read_from_url(name: str, text: str) -> tuple[DatabaseURL, ...]:
    """The same from the broker's URL, which people see: a password has no place there."""
    if masked(text) != text and text not in _meant:
        raise ConfigurationError(
            f"{name} has a password, which would be seen in the broker's URL: put it in "
            f"broker_transport_options, or name an environment variable: {name}=env:NAME"
        )
    return read_databases(name, text)


def _read(name: str, value: Any) -> DatabaseURL:
    if isinstance(value, DatabaseURL):
        return value
    text = str(value)
    text = _meant.get(text, text)
    if text.startswith(FROM_ENVIRONMENT):
        variable = text.removeprefix(FROM_ENVIRONMENT)
        if not os.environ.get(variable):
            raise ConfigurationError(
                f"{name} is in the environment variable {variable!r}, which is not set here"
            )
        text = os.environ[variable]
    if text == BESIDE:
        return DatabaseURL(text)
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[1].lower() not in _DRIVERS:
        shown = scheme[0] if scheme else "what has no scheme"  # the rest may hold a password
        raise ConfigurationError(
            f"{name} must be the URL of a database, such as sqlite:////path/library.db, "
            f"postgresql://user:password@host/db or mysql://user:password@host/db, not {shown}"
        )
    if text.count("@") > 1:
        # SQLAlchemy ends the password at the first, and would tell the rest as the host's name.
        raise ConfigurationError(
            f"{name} has an @ besides the one before the host: write it as %40, in {masked(text)}"
        )
    return DatabaseURL(text)


def hide(options: dict[str, Any], name: str) -> None:
    """Replace the URLs in a connection's options by masked ones, which mean the same in this
    process."""
    try:
        found = read_databases(name, options.get(name))
    except ConfigurationError:
        return  # it is told where the options are read
    shown = []
    for one in found:
        text = str(one)
        if one.has_secret and _meant.setdefault(text, one._url) != one._url:
            _meant[text] = one._url  # the latest password
        shown.append(text)
    if any(one.has_secret for one in found):
        options[name] = shown if isinstance(options[name], (list, tuple)) else shown[0]


# -- options of a connection, from a URL's query and broker_transport_options

#: Which of a consumer's queues is served next: each in turn, the first that was consumed, or the
#: first by name.
ROUND_ROBIN, PRIORITY, SORTED = "round_robin", "priority", "sorted"
STRATEGIES = (ROUND_ROBIN, PRIORITY, SORTED)


#: What ``toc_otel`` may be beside nothing: whether a message begins a trace that links to its
#: sender's, or goes on in that if it was due when it was sent.
LINKS, PARENTS = "links", "parents"

#: Names of options whose values are secret.
_SECRET = re.compile("password|secret|token|credential", re.IGNORECASE)


#: How strictly the other end's certificate is checked, as redis-py spells it.
_REQUIREMENTS = ("none", "optional", "required")


def read_requirement(value: Any) -> str:
    """How strictly certificates are checked: ``none``, ``optional`` or ``required``.

    value: one of these, or as Python's ssl module and Kombu spell it: ``CERT_NONE``, ssl.CERT_NONE

    Raises ConfigurationError.
    """
    if value is None:
        return "none"
    name = value.name if isinstance(value, ssl.VerifyMode) else str(value)
    name = name.rpartition(".")[2].removeprefix("CERT_").lower()
    if name.isdigit() and int(name) < len(_REQUIREMENTS):
        name = _REQUIREMENTS[int(name)]
    if name not in _REQUIREMENTS:
        raise ConfigurationError(f"ssl_cert_reqs must be required, optional or none, not {value!r}")
    return name


_flag = Flag().check


def _text(name: str, value: Any) -> str:
    return str(value)


def _tracing(name: str, value: Any) -> str:
    if value in (LINKS, PARENTS):
        return str(value)
    try:
        return LINKS if _flag(name, value) else ""
    except ConfigurationError:
        raise ConfigurationError(
            f"{name} must be true, false, {LINKS!r} or {PARENTS!r}, not {value!r}"
        ) from None


def _steps(name: str, value: Any) -> tuple[int, ...]:
    return check_steps(value.split(",") if isinstance(value, str) else value)


def _topics(name: str, value: Any) -> dict[str, dict[str, Any]]:
    maps = [value, *value.values()] if isinstance(value, Mapping) else [value]
    if not all(isinstance(one, Mapping) and all(isinstance(k, str) for k in one) for one in maps):
        raise ConfigurationError(
            f"{name} must map topics to limits, as in {{'mail': {{'slots': 16}}}}, not {value!r}"
        )
    for topic, limits in value.items():
        Declaration.of(topic, **limits)
    return {topic: dict(limits) for topic, limits in value.items()}


#: A number of a slot, or a range of them.
_SLOTS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def _slots(name: str, value: Any) -> tuple[int, ...]:
    """Slot numbers: ``0-3,6``, or a list of numbers and such texts."""
    parts = value.split(",") if isinstance(value, str) else value
    most = MAX_SLOTS
    found: set[int] = set()
    for part in parts if isinstance(parts, (list, tuple, set, frozenset)) else (None,):
        match = None if isinstance(part, bool) else _SLOTS.fullmatch(str(part).strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        if not first <= last < most:
            raise ConfigurationError(
                f"{name} must be slot numbers below {most}, such as '0-3,6' or [0, 1], or map a "
                f"topic to them, not {value!r}"
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _preference(name: str, value: Any) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    if isinstance(value, Mapping):
        return {str(topic): _slots(f"{name} of {topic!r}", slots) for topic, slots in value.items()}
    return _slots(name, value)


def _names(name: str, value: Any) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    given = (value,) if isinstance(value, str) else value
    if isinstance(given, (list, tuple)) and all(one and isinstance(one, str) for one in given):
        return tuple(given)
    raise ConfigurationError(
        f"{name} must be true, or names of arguments such as ['password', '*token*'], not {value!r}"
    )


def _strategy(name: str, value: Any) -> str:
    for strategy in STRATEGIES:
        if value == strategy:
            return strategy
    raise ConfigurationError(f"{name} must be one of {', '.join(STRATEGIES)}, not {value!r}")


def _sentinel_kwargs(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{name} must map redis-py's options to values, such as {{'password': '...'}}"
        )
    for option in value:
        if option not in _REDIS and option not in ("ssl", *_IGNORED):
            raise ConfigurationError(
                f"unknown option {option!r} in {name}{suggestion(option, ['ssl', *_REDIS])}"
            )
    return {k: v for k, v in value.items() if k not in _IGNORED}


def mask_secrets(value: Any) -> Any:
    """An option's value for display: without the passwords of URLs and the secrets of mappings."""
    if isinstance(value, str):
        return mask_password(value)
    if isinstance(value, (list, tuple)):
        return [mask_secrets(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: "**" if _SECRET.search(str(key)) and inner is not None else mask_secrets(inner)
        for key, inner in value.items()
    }


class Option(NamedTuple):
    """An option: how it is read, and where it may be given."""

    #: takes the option's name and a value, which is text in a URL; returns the value to use
    read: Callable[[str, Any], Any]
    in_url: bool = True
    #: whether ``broker_transport_options`` may have it; if not, it belongs to others there
    in_options: bool = True
    #: whether None there means that it is not set, as with Kombu's options for Sentinel
    may_be_none: bool = False
    #: how it is read in a URL, if otherwise
    read_in_url: Callable[[str, str], Any] | None = None


_SECONDS = Number(float, 0, unit="seconds").read
_POSITIVE_SECONDS = Number(float, 0.01, unit="seconds").read
_NATURAL = Number(int, 0, most=float("inf")).read


def _row(read: Callable[[str, Any], Any], **how: Any) -> dict[str, Option]:
    """The metadata of a field of :class:`Settings` that is an option."""
    return {"option": Option(read, **how)}


def _option(default: Any, read: Callable[[str, Any], Any], **how: Any) -> Any:
    """A field of :class:`Settings` that is an option."""
    return field(default=default, metadata=_row(read, **how))


@dataclass
class Settings:
    """The options of one connection, checked: a field for each. Times are in seconds."""

    #: how long a delivered message may stay unacknowledged without a renewal of its lease
    visibility_timeout: float = _option(Limits().visibility, LIMITS["visibility"].read)
    #: the first part of every key, before ``toc_prefix``
    global_keyprefix: str = _option("", _text)
    #: distinct priority levels, 0 first; None: each topic's own
    priority_steps: tuple[int, ...] | None = _option(None, _steps)
    #: which queue is served when several have due messages: ``round_robin``, each in turn;
    #: ``priority``, the first that was consumed; ``sorted``, the first by name
    queue_order_strategy: str = _option(ROUND_ROBIN, _strategy)
    #: the prefix of every key
    toc_prefix: str = _option("toc:", _text)
    #: slot count of topics that are declared without one; None: 1, and 8 on a Cluster
    toc_slots: int | None = _option(None, LIMITS["slots"].read)
    #: redeliveries of a message, in topics that are declared without a number
    toc_retries: int = _option(MAX_RETRIES, LIMITS["retries"].read)
    #: how long a message waits after its first failed delivery; doubled with each further one
    toc_retry_backoff: float = _option(Limits().retry_backoff, LIMITS["retry_backoff"].read)
    #: the longest of these waits
    toc_retry_backoff_max: float = _option(
        Limits().retry_backoff_max, LIMITS["retry_backoff_max"].read
    )
    #: how long DeadQueue keeps a message
    toc_dead_age: float = _option(Limits().dead_age, LIMITS["dead_age"].read)
    #: how many messages a topic's DeadQueue keeps
    toc_dead_limit: int = _option(Limits().dead_limit, LIMITS["dead_limit"].read)
    #: for how long one delivery may be renewed in all; 0: for ever
    toc_max_lease: float = _option(Limits().max_lease, LIMITS["max_lease"].read)
    #: how many replicas must have a message before its publish returns
    toc_wait_replicas: int = _option(0, _NATURAL)
    #: how long a publish waits for them
    toc_wait_timeout: float = _option(1.0, _POSITIVE_SECONDS)
    #: per topic: ``slots``, ``retries``, ``visibility``, ``retry_backoff``,
    #: ``retry_backoff_max``, ``dead_age``, ``dead_limit``, ``max_lease``, ``message_ttl``,
    #: ``dead_expired``, ``steps``, and what limits starts, keys and puts (``TERMS``)
    toc_topics: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata=_row(_topics, in_url=False)
    )
    #: how long before its action time an idle worker may fetch a message, and then hold it
    toc_lookahead: float = _option(0.020, _SECONDS)
    #: how long a message must have been due before a busy worker fetches it
    toc_queue_after: float = _option(0.005, _SECONDS)
    #: bytes of messages that one fetch may return; a larger message is fetched alone
    toc_pop_bytes: int = _option(8_000_000, _NATURAL)
    #: slots that a consumer takes first, of every topic or per topic; the others only what has been
    #: due for a second
    toc_prefer_slots: tuple[int, ...] | dict[str, tuple[int, ...]] = field(
        default=(), metadata=_row(_preference)
    )
    #: how often an idle consumer checks all slots, whatever was announced
    toc_poll_interval: float = _option(1.0, _POSITIVE_SECONDS)
    #: whether messages that will wait are compressed
    toc_deflate: bool = _option(True, _flag)
    #: whether a revoke deletes the waiting message from Redis; read by celery_toc
    toc_revoke_removes: bool = _option(True, _flag)
    #: whether a task that fails for good goes to DeadQueue; read by celery_toc
    toc_dead_on_failure: bool = _option(False, _flag)
    #: how many failed tasks each queue keeps; 0: none
    toc_failures: int = _option(FailureBounds().number, Number(int, 0, most=1_000_000).read)
    #: for how long
    toc_failures_age: float = _option(
        FailureBounds().age, Number(float, 60, most=31_536_000, unit="seconds").read
    )
    #: bytes that those of a queue have together
    toc_failures_bytes: int = _option(
        FailureBounds().bytes, Number(int, 16 << 10, most=1 << 30).read
    )
    #: bytes of a message that is kept with its failure; a larger one is not, nor retried
    toc_failures_message: int = _option(FailureBounds().message, Number(int, 0, most=64 << 20).read)
    #: arguments that are hidden before a failure is kept: true, or names; read by celery_toc
    toc_failures_mask: bool | tuple[str, ...] = field(
        default=False, metadata=_row(_names, in_url=False)
    )
    #: about how many broadcast messages an exchange keeps for consumers that reconnect
    toc_fanout_length: int = _option(10_000, _NATURAL)
    #: how long, at least, an exclusive, auto-delete or expiring queue outlives its last refresh
    toc_stale_after: float = _option(60.0, _POSITIVE_SECONDS)
    #: whether operations and lateness are counted
    toc_metrics: bool = _option(True, _flag)
    #: whether OpenTelemetry has a span for what is sent, received and settled: ``links``, or
    #: ``parents``; empty: it has none
    toc_otel: str = _option("", _tracing)
    #: databases of the task library; empty: there is none
    toc_library: tuple[DatabaseURL, ...] = _option(
        (), read_databases, may_be_none=True, read_in_url=read_from_url
    )
    #: tables of each kind that each of these databases has
    toc_library_tables: int = _option(1, Number(int, 1, most=256).read)
    #: databases, and tables of each, from which rows are moved to these
    toc_library_before: tuple[DatabaseURL, ...] = _option(
        (), read_databases, may_be_none=True, read_in_url=read_from_url
    )
    toc_library_tables_before: int = _option(1, Number(int, 1, most=256).read)
    #: whether a publish fails if its row cannot be written; else the row is written later
    toc_library_required: bool = _option(True, _flag)
    #: how long a statement to a database may take
    toc_library_timeout: float = _option(5.0, _POSITIVE_SECONDS)
    #: for how long history is kept
    toc_library_retention: float = _option(
        30 * 86_400.0, Number(float, 86_400, unit="seconds").read
    )
    #: the name by which the sentinels know the server
    master_name: str = _option("", _text, may_be_none=True)
    #: how many other sentinels a sentinel must know for its answer to count
    min_other_sentinels: int = _option(0, _NATURAL, may_be_none=True)
    #: arguments of redis-py's connections to the sentinels, and ``ssl``
    sentinel_kwargs: dict[str, Any] = field(
        default_factory=dict,
        repr=False,
        metadata=_row(_sentinel_kwargs, in_url=False, may_be_none=True),
    )
    #: whether the server speaks TLS; the scheme ``rediss`` implies it
    ssl: bool = _option(False, _flag, in_options=False)
    #: whether the sentinels speak TLS
    sentinel_ssl: bool = _option(False, _flag)
    #: arguments of redis-py's connections
    connection: dict[str, Any] = field(default_factory=dict)
    #: transport options without effect, each with the reason
    ignored: list[str] = field(default_factory=list, compare=False, repr=False)

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={mask_secrets(getattr(self, field.name))!r}"
            for field in fields(self)
            if field.repr
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def prefix(self) -> str:
        return self.global_keyprefix + self.toc_prefix

    @property
    def failures(self) -> FailureBounds:
        """How much is kept of failed tasks."""
        return FailureBounds(
            self.toc_failures,
            self.toc_failures_age,
            self.toc_failures_bytes,
            min(self.toc_failures_message, self.toc_failures_bytes // 2),
        )

    @property
    def limits(self) -> Limits:
        """Limits of topics that are declared without them."""
        return Limits(
            self.visibility_timeout,
            self.toc_retry_backoff,
            self.toc_retry_backoff_max,
            self.toc_dead_age,
            self.toc_dead_limit,
            self.toc_max_lease,
        )


#: The options, by their names. Those that set a limit of topics share its bounds.
_OPTIONS: dict[str, Option] = {
    row.name: row.metadata["option"] for row in fields(Settings) if row.metadata
}

#: Kombu's own options that a URL may have; Kombu reads them.
_KOMBU = frozenset(
    (
        *("max_retries", "interval_start", "interval_step", "interval_max"),
        *("connect_retries_timeout", "virtual_host"),
    )
)

#: The same of ``broker_transport_options``, where Kombu or a producer puts some more.
_KOMBU_OPTIONS = _KOMBU | {
    *("body_encoding", "callback", "deadletter_queue", "errback", "polling_interval"),
    "retry_errors",
}

#: Options of Kombu's own Redis transport that this one does not need. Apps that move have them.
_KOMBU_REDIS = frozenset(
    (
        *("ack_emulation", "fanout_patterns", "fanout_prefix", "reauth_check_interval"),
        *("retry_on_timeout", "sentinel_fanout_compat", "sep", "unacked_index_key"),
        *("unacked_key", "unacked_mutex_expire", "unacked_mutex_key"),
        *("unacked_restore_interval", "unacked_restore_limit", "unacked_restore_throttle"),
    )
)

#: Why these have no effect.
_NOT_NEEDED = "an option of Kombu's redis transport, not needed here"


@lru_cache
def arguments_of(*classes: type) -> frozenset[str]:
    """The arguments that these classes of redis-py's take."""
    names: set[str] = set()
    for cls in classes:
        for parent in cls.__mro__[:-1]:
            init: Callable[..., None] = getattr(parent, "__init__")  # noqa: B009 - it is looked at only
            names.update(inspect.signature(init).parameters)
    return frozenset(n for n in names if not n.startswith("_")) - {"self", "args", "kwargs"}


#: Arguments that redis-py's connections and pools take.
_REDIS = arguments_of(
    redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection, redis.ConnectionPool
) - {
    *("connection_class", "decode_responses", "encoding", "encoding_errors"),
    *("parser_class", "protocol", "redis_connect_func", "retry", "retry_on_error"),
    "retry_on_timeout",
}

#: Accepted without effect: a command that may have run is never repeated blindly.
_IGNORED = frozenset(("retry_on_timeout",))


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``broker_transport_options`` that mean something here, and those that ought to: an
    app may have others, which a center of its own refuses."""
    known = _OPTIONS.keys() | _REDIS | _KOMBU_REDIS | _KOMBU_OPTIONS
    return {
        name: value
        for name, value in options.items()
        if name in known or str(name).startswith("toc_")
    }


def read(
    query: Mapping[str, str], options: Mapping[str, Any], *, of_center: bool = False
) -> Settings:
    """Check and merge a URL's query with the transport options; the query has precedence.

    of_center: the options are arguments of a call, which has no others

    Raises ConfigurationError for a wrong value, for an unknown option in the URL or of a center,
    and for an unknown transport option that begins with ``toc_``; it suggests a known name that is
    similar. Other unknown transport options are listed in :attr:`Settings.ignored`.
    """
    settings = Settings()
    for name, value in options.items():
        option = _OPTIONS.get(name)
        if option is not None and option.in_options:
            if value is not None or not option.may_be_none:
                setattr(settings, name, option.read(name, value))
        elif name in _REDIS:
            settings.connection[name] = value
        elif str(name).startswith("toc_"):
            raise _unknown(name, "broker_transport_options")
        elif name in _KOMBU_REDIS:
            settings.ignored.append(f"{name!r} ({_NOT_NEEDED})")
        elif name not in _KOMBU_OPTIONS and of_center:
            raise _unknown(name, "the options of a center")
        elif name not in _KOMBU_OPTIONS:
            settings.ignored.append(f"{name!r} (no such option{suggestion(name, _known())})")
    for name, text in query.items():
        option = _OPTIONS.get(name)
        if option is not None and option.in_url:
            setattr(settings, name, (option.read_in_url or option.read)(name, text))
        elif option is not None:
            raise ConfigurationError(
                f"{name} has no form that fits the URL: put it in broker_transport_options"
            )
        elif name in _REDIS:
            settings.connection[name] = _redis_argument(name, text)
        elif name in _KOMBU_REDIS and name not in _IGNORED:
            raise ConfigurationError(f"{name!r} in the URL is {_NOT_NEEDED}: leave it out")
        elif name not in _KOMBU and name not in _IGNORED:
            raise _unknown(name, "the URL")
    return settings


def _redis_argument(name: str, text: str) -> Any:
    """An argument of redis-py's from a URL."""
    parsers: dict[str, Any] = {**URL_QUERY_ARGUMENT_PARSERS}
    parser = parsers.get(name)
    if name == "ssl_cert_reqs":  # Kombu spells it as Python's ssl module does
        text = read_requirement(text)
    try:
        return parser(text) if parser else text
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} cannot be {text!r}") from None


def _known() -> list[str]:
    return sorted({*_OPTIONS, *_REDIS})


def _unknown(name: str, place: str) -> ConfigurationError:
    return ConfigurationError(f"unknown option {name!r} in {place}{suggestion(name, _known())}")


def suggestion(name: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: a known name, if one is similar."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


# -- broker URLs

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379

# The second form is a password with a '/', '?' or '#' that is not percent-encoded, or a URL without
# a scheme. Neither can be used, so both are shown in errors.
_PASSWORD = re.compile(
    r"(://[^/?#]*?:)[^/?#]*(@)"
    r"|((?:^|://)[^/?#@:;]*:(?!//|\d*(?:/\d*)?\?))[^;]*(@)"
    r"|([?&](?:password|ssl_password)=)[^&#;]*"
)

# Several hosts, then path and query. `urlsplit` refuses [::1] beside another host in newer Pythons.
_HOSTS_AND_TAIL = re.compile(r"([^/?]*)(.*)", re.DOTALL)


def mask_password(url: str, mask: str = "**") -> str:
    """The URL without its passwords."""

    def hide(match: re.Match[str]) -> str:
        if match[5]:
            return f"{match[5]}{mask}"
        return f"{match[1] or match[3]}{mask}@"

    return _PASSWORD.sub(hide, url)


@dataclass
class Address:
    """Where a server is, and the login for it."""

    kind: str
    host: str = "localhost"
    port: int = DEFAULT_PORT
    path: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    query: dict[str, str] = field(default_factory=dict, repr=False)
    #: host and port of each sentinel, or of the Cluster's nodes that the URL names
    hosts: tuple[tuple[str, int], ...] = ()


def read_url(url: str) -> Address:
    """Parse a broker URL, with or without its ``toc+``.

    Raises ConfigurationError, whose text has no password, if the URL cannot be used.
    """
    if not isinstance(url, str):
        raise ConfigurationError(
            f"a broker URL is a str: toc+redis://localhost:6379/0, not a {type(url).__name__}"
        )
    scheme, _, rest = url.partition("://")
    kind = "redis" if scheme == "toc" else scheme.removeprefix("toc+")
    shown = mask_password(url)
    if kind not in KINDS:
        raise ConfigurationError(
            f"{shown}: unknown scheme; use one of {', '.join('toc+' + k for k in KINDS)}"
        )
    if kind == "cluster":
        return _read_cluster(rest, shown)
    if kind == "sentinel":
        return _read_sentinels(url, shown)
    try:
        parts = urlsplit("//" + rest)
        port = parts.port
    except ValueError:  # its text may contain the password
        raise _unreadable(shown) from None
    address = Address(
        kind,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        query=dict(parse_qsl(parts.query, keep_blank_values=True)),
    )
    if kind in ("unix", "embedded"):
        # Kombu's own spelling of sockets, redis+socket://, allows a host part: a relative path.
        address.path = unquote((parts.netloc.rpartition("@")[2]) + parts.path)
        address.db = _database(shown, address.query.pop("virtual_host", None))
        address.db = _database(shown, address.query.pop("db", None)) or address.db
        if kind == "unix" and not address.path:
            raise ConfigurationError(f"{shown}: name the socket, as in toc+unix:///run/redis.sock")
        return address
    address.host = unquote(parts.hostname or "localhost")
    address.port = port or DEFAULT_PORT
    path = unquote(parts.path).strip("/")
    address.db = _database(shown, address.query.pop("db", None) or path)
    return address


def _read_cluster(rest: str, shown: str) -> Address:
    """``toc+cluster://user:password@h1:7000,h2:7000``: one or more nodes of a Cluster."""
    netloc, tail = _HOSTS_AND_TAIL.findall(rest)[0]
    login, _, hosts = netloc.rpartition("@")
    login = f"{login}@" if login else ""
    each = [read_url(f"redis://{login}{host}{tail}") for host in hosts.split(",") if host]
    if not each:
        raise ConfigurationError(f"{shown}: name a node, as in toc+cluster://host:7000")
    address = each[0]
    address.kind = "cluster"
    address.hosts = tuple(dict.fromkeys((one.host, one.port) for one in each))
    if address.db:
        raise ConfigurationError(
            f"{shown}: a Redis Cluster has no database numbers, only 0; leave /{address.db} out, "
            "and tell apps apart by global_keyprefix in broker_transport_options"
        )
    return address


def _unreadable(shown: str) -> ConfigurationError:
    return ConfigurationError(
        f"{shown}: the host or the port cannot be read; in a password, percent-encode '/', "
        "'?', '#' and '@'"
    )


def _read_sentinels(url: str, shown: str) -> Address:
    """Sentinels, separated by commas, or as Kombu's list of URLs, separated by semicolons.

    A setting that one URL of a list has applies to all of them.
    """
    address = Address("sentinel")
    hosts: list[tuple[str, int]] = []
    said: dict[str, Any] = {}

    def say(name: str, value: Any) -> None:
        if said.setdefault(name, value) != value:
            raise ConfigurationError(
                f"{shown}: its sentinels' URLs differ in {name}; they lead to one broker"
            )

    for part in url.split(";"):
        scheme, _, rest = part.partition("://")
        if scheme.removeprefix("toc+") != "sentinel":
            raise ConfigurationError(f"{shown}: sentinels stand among others; name them alone")
        try:
            netloc, tail = _HOSTS_AND_TAIL.findall(rest)[0]
            parts = urlsplit("//" + tail)
            for one in netloc.split(","):
                host = urlsplit("//" + one)
                hosts.append((unquote(host.hostname or "localhost"), host.port or SENTINEL_PORT))
                if host.username:
                    say("user", unquote(host.username))
                if host.password:
                    say("password", unquote(host.password))
        except ConfigurationError:
            raise
        except ValueError:  # its text may contain the password
            raise _unreadable(shown) from None
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            say(f"?{name}", value)
        if path := unquote(parts.path).strip("/"):
            say("database", _database(shown, path))
    address.hosts = tuple(dict.fromkeys(hosts))
    address.host, address.port = address.hosts[0]
    address.username, address.password = said.get("user"), said.get("password")
    address.query = {name[1:]: value for name, value in said.items() if name[0] == "?"}
    address.db = _database(shown, address.query.pop("db", None) or said.get("database"))
    return address


def sentinel_url(address: Address) -> str:
    """The URL of sentinels in the form with commas, without its password."""
    hosts = ",".join(
        f"[{host}]:{port}" if ":" in host else f"{quote(host)}:{port}"
        for host, port in address.hosts
    )
    user = f"{quote(address.username, safe='')}@" if address.username else ""
    query = f"?{urlencode(address.query)}" if address.query else ""
    return f"sentinel://{user}{hosts}/{address.db}{query}"


def server_url(url: str) -> str:
    """A broker URL as other libraries read it: ``redis://``, ``rediss://`` or
    ``redis+socket://``, with those of its options that are redis-py's.

    Joins the embedded server if the URL names one. Raises ConfigurationError for a URL that cannot
    be used, and for the URL of a Cluster or of sentinels, which name several servers.
    """
    address = read_url(url)
    if address.kind in ("cluster", "sentinel"):
        raise ConfigurationError(f"{mask_password(url)} is not the URL of one server")
    query = {n: value for n, value in address.query.items() if n in _REDIS and n not in _OPTIONS}
    tls = address.kind == "rediss" or read(address.query, {}).ssl
    login = ""
    if address.username or address.password:
        user, password = (quote(s or "", safe="") for s in (address.username, address.password))
        login = f"{user}:{password}@"
    if address.kind in ("unix", "embedded"):
        path = address.path
        if address.kind == "embedded":
            path = EmbeddedServer.join(address.path).socket
        if address.db:
            query["virtual_host"] = str(address.db)
        plain = f"redis+socket://{login}{quote(path)}"
    else:
        host = f"[{address.host}]" if ":" in address.host else quote(address.host)
        scheme = "rediss" if tls else "redis"
        plain = f"{scheme}://{login}{host}:{address.port}/{address.db}"
        if tls:
            query.setdefault("ssl_cert_reqs", "required")
    return f"{plain}?{urlencode(query)}" if query else plain


def _database(shown: str, text: Any) -> int:
    text = str(text or "0").strip("/") or "0"
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"{shown}: the database must be a number")
    return int(text)
