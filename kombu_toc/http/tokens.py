"""Who may do what: bearer tokens, which are kept as SHA-256 hashes.

A line of the file, or of the environment variable ``TOC_HTTP_TOKENS``, is one token::

    # name  hash                 roles        queues      options
    shop    sha256:9f86d0818...  read,write   mail,sms-*  rate=200/s

A queue is a name or a pattern with ``*`` and ``?``. A token is 256 random bits, so a plain hash is
enough: nobody can try them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

from ..errors import ConfigurationError
from .problems import Problem, retry_after
from .request import ROLES

logger = logging.getLogger(__name__)

_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_RATE = re.compile(r"rate=(\d{1,7})/([sm])")

#: The environment variable with tokens.
TOKENS = "TOC_HTTP_TOKENS"

#: Seconds after which a file of tokens is looked at again.
REREAD = 1.0

#: Tokens in one file, at most: each request compares with all of them.
MAX_TOKENS = 1000


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of these is the name, or a pattern of it: ``*`` is any text, ``?`` any
    character, and anything else is itself."""
    # fnmatch also knows sets in brackets, in which one bracket stands for itself.
    return any(fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)


class Token:
    """One token.

    rate: requests a second, 0: any number
    is_anonymous: whether it is that of everybody who has none
    """

    def __init__(
        self,
        name: str,
        digest: bytes,
        roles: Iterable[str],
        queues: Iterable[str],
        rate: float = 0.0,
        is_anonymous: bool = False,
    ) -> None:
        self.name = name
        self.digest = digest
        self.roles = frozenset(roles)
        self.queues = tuple(queues)
        self.rate = rate
        self.is_anonymous = is_anonymous
        #: tells it from others
        self.said = (name, digest, self.roles, self.queues, rate)
        self._may = lru_cache(maxsize=10_000)(self._matches)
        self._used_until = 0.0

    def _matches(self, queue: str) -> bool:
        return matches(queue, self.queues)

    def allows(self, role: str, queue: str | None) -> bool:
        """Whether it may do this to a queue; None: to what is of all queues."""
        if role not in self.roles:
            return False
        return self._may(queue) if queue is not None else "*" in self.queues

    def sees(self, queue: str) -> bool:
        return self._may(queue)

    def spend(self, now: float) -> float:
        """Count a request; seconds until it may be repeated, 0 if it may be done now."""
        if not self.rate:
            return 0.0
        # A second's worth may come at once.
        used = max(self._used_until, now - max(1.0, 1 / self.rate))
        if used + 1 / self.rate > now:
            return used + 1 / self.rate - now
        self._used_until = used + 1 / self.rate
        return 0.0


#: Who asks where there are no tokens: the machine's own user.
NOBODY = Token("", b"", ROLES, ("*",))


class Tokens:
    """The tokens of a server.

    tokens: all of them; empty: everybody may do everything, which is for loopback only
    anonymous_read: whether who has no token may read
    clock: monotonic seconds
    reread: gives those that there are by now, if they have changed since it was asked last; None
        if they have not. It is asked once a second at most
    """

    def __init__(
        self,
        tokens: Iterable[Token] = (),
        *,
        anonymous_read: bool = False,
        clock: Callable[[], float] = time.monotonic,
        reread: Callable[[], list[Token] | None] | None = None,
    ) -> None:
        self.tokens = tuple(tokens)
        #: also when all have been removed: then nobody may do anything
        self._needed = bool(self.tokens)
        self._clock = clock
        self._reread = reread
        self._read_at = clock()
        self._anonymous = None
        if anonymous_read:
            self._anonymous = Token("", b"", ("read",), ("*",), is_anonymous=True)
        if anonymous_read and not self.tokens:
            raise ConfigurationError(
                "reading without a token is a choice where there are tokens; without any, "
                "everything is allowed, from this machine only"
            )

    def __bool__(self) -> bool:
        return self._needed

    def refresh(self) -> None:
        """Have the tokens that there are by now."""
        now = self._clock()
        if self._reread is None or now - self._read_at < REREAD:
            return
        self._read_at = now
        found = self._reread()
        if found is not None:
            # What was not changed goes on, with what it has used of its rate.
            before = {one.said: one for one in self.tokens}
            self.tokens = tuple(before.get(one.said, one) for one in found)

    def has(self, token: Token) -> bool:
        """Whether a token that was known before is known now."""
        self.refresh()
        return token is NOBODY or token is self._anonymous or token in self.tokens

    def check(self, authorization: str) -> Token:
        """The token of a request. Raises Problem if it has none that is known, or has used it too
        often."""
        if not self:
            return NOBODY
        self.refresh()
        found = self._find(authorization)
        self.spend(found)
        return found

    @property
    def anonymous(self) -> Token | None:
        """That of everybody who has none, if they may look."""
        return self._anonymous

    def named(self, name: str) -> Token | None:
        """The token of that name."""
        self.refresh()
        return next((one for one in self.tokens if one.name == name), None)

    def spend(self, token: Token) -> None:
        """Count a request. Raises Problem if there were too many."""
        if left := token.spend(self._clock()):
            raise Problem(
                "rate-limited",
                f"the token {token.name!r} may send {token.rate:g} requests a second",
                headers=retry_after(left),
            )

    def _find(self, authorization: str) -> Token:
        if not authorization and self._anonymous is not None:
            return self._anonymous
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise _unauthorized("send a token: Authorization: Bearer TOKEN")
        digest = digest_of(secret.strip())
        found = None
        for token in self.tokens:  # all, whichever it is: the time tells nothing
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None:
            raise _unauthorized("this token is not known here")
        return found


def _unauthorized(detail: str) -> Problem:
    challenge = (b"www-authenticate", b'Bearer realm="celery-toc"')
    return Problem("unauthorized", detail, "authorization", (challenge,))


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def read_tokens(text: str, where: str) -> list[Token]:
    """The tokens in a text, one a line; semicolons also end a line.

    where: what the text is of, for an error

    Raises ConfigurationError, which names the line and never shows it: somebody may have written
    the token itself.
    """
    found: list[Token] = []
    for number, line in enumerate(text.replace(";", "\n").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        said = f"{where}, line {number}"
        if len(words) not in (4, 5):
            raise ConfigurationError(
                f"{said}: a token has a name, a hash, roles and queues, as in "
                "'shop sha256:9f86... read,write mail,sms-*'; --new-token makes one"
            )
        name, hashed, roles, queues, *rest = words
        digest = _HASH.fullmatch(hashed)
        if digest is None:
            raise ConfigurationError(
                f"{said}: the second word must be sha256: and 64 hexadecimal digits, the hash of "
                "the token and not the token"
            )
        if unknown := set(roles.split(",")) - set(ROLES):
            raise ConfigurationError(
                f"{said}: there is no role {min(unknown)!r}; there are {', '.join(ROLES)}"
            )
        rate = _RATE.fullmatch(rest[0]) if rest else None
        if rest and (rate is None or not int(rate[1])):
            raise ConfigurationError(f"{said}: the last word must be a rate, as rate=200/s")
        if any(one.name == name for one in found):
            raise ConfigurationError(f"{said}: there is another token {name!r}")
        each = 0.0 if rate is None else int(rate[1]) / (60 if rate[2] == "m" else 1)
        found.append(
            Token(name, bytes.fromhex(digest[1]), roles.split(","), queues.split(","), each)
        )
    if len(found) > MAX_TOKENS:
        raise ConfigurationError(f"{where}: {len(found)} tokens, and {MAX_TOKENS} at most are read")
    return found


def tokens_of(path: str | None, anonymous_read: bool) -> Tokens:
    """The tokens of a file and of the environment. Raises ConfigurationError and OSError."""
    always = read_tokens(os.environ.get(TOKENS, ""), TOKENS)
    if path is None:
        return Tokens(always, anonymous_read=anonymous_read)
    file = _File(path)
    found = [*file.read(), *always]

    def reread() -> list[Token] | None:
        changed = file.changed()
        return None if changed is None else [*changed, *always]

    return Tokens(found, anonymous_read=anonymous_read, reread=reread)


class _File:
    """A file of tokens, which may change."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._text = ""
        self._trouble = ""

    def read(self) -> list[Token]:
        """Raises ConfigurationError and OSError."""
        with open(self._path, encoding="utf-8") as file:
            self._text = file.read()
        return read_tokens(self._text, self._path)

    def changed(self) -> list[Token] | None:
        """The tokens, if the file has changed. One that cannot be used is told, once."""
        before = self._text
        try:
            found = self.read()
        except (OSError, ValueError, ConfigurationError) as exc:
            if str(exc) != self._trouble:
                self._trouble = str(exc)
                logger.error("the tokens stay as they were: %s", exc)
            return None
        self._trouble = ""
        return found if self._text != before else None


def new_token(name: str, roles: str, queues: str) -> tuple[str, str]:
    """A token, and its line in a file. Raises ConfigurationError."""
    secret = f"toc_{secrets.token_urlsafe(32)}"
    line = f"{name} sha256:{digest_of(secret).hex()} {roles} {queues}"
    read_tokens(line, "the new token")
    return secret, line
