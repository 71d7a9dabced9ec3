"""URLs of databases, whose passwords are shown nowhere."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import unquote

from ..errors import ConfigurationError

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
_SECRET = re.compile(r"([?&][^=&]*(?:pass|secret|token|key)[^=&]*=)([^&]*)", re.IGNORECASE)
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


class DatabaseURL:
    """The URL of a database. Its text and its repr have no password."""

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url

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
        said += [match[2] for match in _SECRET.finditer(self._url)]
        secrets = {one for secret in said for one in (secret, unquote(secret))}
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= SHORTEST:
                text = text.replace(secret, "**")
        return text

    def __str__(self) -> str:
        return masked(self._url)

    def __repr__(self) -> str:
        return f"DatabaseURL({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DatabaseURL) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)


def masked(url: str) -> str:
    """A database's URL without its secrets."""
    return _SECRET.sub(r"\1**", _NO_PORT.sub(r"\1:**", _LOGIN.sub(r"\1:**@", url)))


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
