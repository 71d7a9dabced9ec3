"""URLs of databases: what is shown of them, and what is refused."""

from __future__ import annotations

import pytest

from kombu_toc import ConfigurationError
from kombu_toc.client.options import DatabaseURL, masked, read_databases
from kombu_toc.library.shards import library_error, open_engines

from ..support.cases import each


@each(
    ("url", "shown"),
    [
        ("postgresql://toc:sesame@host/db", "postgresql://toc:**@host/db"),
        ("postgresql://toc:ses@me@host/db", "postgresql://toc:**@host/db"),
        ("postgresql://toc:ses/me@host/db", "postgresql://toc:**@host/db"),
        ("postgresql://toc:s@s/m@e@host:5/db", "postgresql://toc:**@host:5/db"),
        ("postgresql://toc:s?s#m@e:@host/db", "postgresql://toc:**@host/db"),
        ("postgresql://toc:ses\nme@host/db", "postgresql://toc:**@host/db"),
        ("postgresql://:sesame@host/db", "postgresql://:**@host/db"),
        ("postgresql://toc:sesame", "postgresql://toc:**"),
        ("postgresql://toc:sesame/db", "postgresql://toc:**"),
        (
            "postgresql://toc@host/db?password=sesame&a=b",
            "postgresql://toc@host/db?password=**&a=b",
        ),
        (
            "mysql://host:3306/db?ssl_key_password=sesame",
            "mysql://host:3306/db?ssl_key_password=**",
        ),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://toc@[::1]:5432/db", "postgresql://toc@[::1]:5432/db"),
        ("postgresql://[::1]:5432/db", "postgresql://[::1]:5432/db"),
        ("postgresql://host:5432", "postgresql://host:5432"),
        ("sqlite:////tmp/a:b.db", "sqlite:////tmp/a:b.db"),
    ],
)
def test_no_part_of_a_password_is_shown(url: str, shown: str) -> None:
    assert masked(url) == str(DatabaseURL(url)) == shown
    assert repr(DatabaseURL(url)) == f"DatabaseURL({shown!r})"


@each(
    "url",
    ["postgresql://toc:ses@me@host/db", "mysql://toc:x@y/z@host/db", "postgresql://a:b@c/d?e=f@g"],
)
def test_an_at_sign_that_would_end_the_password_too_soon_is_refused(url: str) -> None:
    """SQLAlchemy would take the rest for the host's name, and drivers tell that."""
    with pytest.raises(ConfigurationError, match="write it as %40") as raised:
        read_databases("toc_library", url)
    assert "me@" not in str(raised.value)
    assert "y/z" not in str(raised.value)


def test_what_a_driver_says_has_no_secret() -> None:
    url = DatabaseURL("postgresql://toc:se%40same@host/db?sslpassword=open%20it")
    said = "no connection to 'toc:se@same@host' or 'se%40same', with 'open it'"
    assert url.scrub(said) == "no connection to 'toc:**@host' or '**', with '**'"
    assert "same" not in str(library_error(url, ValueError(said)))
    # It would tell which letter it is.
    assert DatabaseURL("mysql://toc:o@host/db").scrub("no host") == "no host"


def test_what_sqlalchemy_shows_of_an_engine_has_no_password() -> None:
    url = DatabaseURL("postgresql://toc:ses%2Fme@host/db")
    for engine in open_engines(url, 5.0)[:2]:
        assert "ses" not in repr(engine) + str(engine.url) + repr(engine.pool)
