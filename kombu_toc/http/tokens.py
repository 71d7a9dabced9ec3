"""Who may do what: bearer tokens, which are kept as SHA-256 hashes, and sessions of the page; what
is hidden from whom; and who has done what.

A line of the file, or of the environment variable ``TOC_HTTP_TOKENS``, is one token::

    # name  hash                 roles        queues      options
    shop    sha256:9f86d0818...  read,write   mail,sms-*  rate=200/s

A queue is a name or a pattern with ``*`` and ``?``. A token is 256 random bits, so a plain hash is
enough: nobody can try them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import takewhile
from operator import eq
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import quote

from redis.exceptions import RedisError

from ..aio.center import AsyncTimeoutCenter
from ..aio.client import AwaitedPart
from ..client.programs import one_line
from ..errors import ConfigurationError, TocError
from .fields import Problem, problem_of, retry_after
from .request import ROLES, Request, check_name, port_of

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
        #: whether it may do anything to a queue
        self.sees = lru_cache(maxsize=10_000)(partial(matches, patterns=self.queues))
        self._used_until = 0.0

    def allows(self, role: str, queue: str | None) -> bool:
        """Whether it may do this to a queue; None: to what is of all queues."""
        if role not in self.roles:
            return False
        return self.sees(queue) if queue is not None else "*" in self.queues

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


def check_role(token: Token, role: str, queue: str | None) -> None:
    """Raises Problem if a token does not allow this for a queue; None: for all."""
    if not token.allows(role, queue):
        where = "of all queues" if queue is None else f"of queue {queue!r}"
        raise Problem("forbidden", f"this needs a token with the role {role} {where}")


class Tokens:
    """The tokens of a server.

    tokens: all of them; empty: everybody may do everything, which is for loopback only
    anonymous_read: whether who has no token may read
    clock: monotonic seconds
    reread: gives those that there are by now; it is asked once a second at most
    """

    def __init__(
        self,
        tokens: Iterable[Token] = (),
        *,
        anonymous_read: bool = False,
        clock: Callable[[], float] = time.monotonic,
        reread: Callable[[], Iterable[Token]] | None = None,
    ) -> None:
        self.tokens = tuple(tokens)
        #: also when all have been removed: then nobody may do anything
        self._needed = bool(self.tokens)
        self._clock = clock
        self._reread = reread
        self._read_at = clock()
        self._trouble = ""
        #: that of everybody who has none, if they may look
        self.anonymous: Token | None = None
        if anonymous_read:
            self.anonymous = Token("", b"", ("read",), ("*",), is_anonymous=True)
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
        before, trouble = {one.said: one for one in self.tokens}, self._trouble
        self._trouble = ""
        try:
            # What was not changed goes on, with what it has used of its rate.
            self.tokens = tuple(before.get(one.said, one) for one in self._reread())
        except (OSError, ValueError, ConfigurationError) as exc:
            self._trouble = str(exc)
            if self._trouble != trouble:
                logger.error("the tokens stay as they were: %s", exc)

    def has(self, token: Token) -> bool:
        """Whether a token that was known before is known now."""
        self.refresh()
        return token is NOBODY or token is self.anonymous or token in self.tokens

    def check(self, authorization: str) -> Token:
        """The token of a request. Raises Problem if it has none that is known, or has used it too
        often."""
        if not self:
            return NOBODY
        self.refresh()
        found = self._find(authorization)
        self.spend(found)
        return found

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
        if not authorization and self.anonymous is not None:
            return self.anonymous
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

    def read() -> list[Token]:
        return [*read_tokens(Path(path).read_text("utf-8"), path), *always]

    return Tokens(read(), anonymous_read=anonymous_read, reread=read)


def new_token(name: str, roles: str, queues: str) -> tuple[str, str]:
    """A token, and its line in a file. Raises ConfigurationError."""
    secret = f"toc_{secrets.token_urlsafe(32)}"
    line = f"{name} sha256:{digest_of(secret).hex()} {roles} {queues}"
    read_tokens(line, "the new token")
    return secret, line


# -- sessions: who looks at the page, by a cookie that a token begins; and forms that only it sends
#
# A session is a random cookie, and an entry in Redis under its hash that names the token. So each
# process of several knows it, and what is kept, there or in the file of tokens, lets nobody in.

#: The cookie, to whose name the port is added; and the field of a form that no other site knows.
COOKIE = "toc_session"
FIELD = "form"

#: Seconds for which a session lasts, and for which a process knows one without asking again.
LASTS = 12 * 3600
KNOWN = 5.0

#: Sessions that a process knows, at most.
MAX_KNOWN = 10_000

#: Characters of a cookie.
_LENGTH = 43


class Visitor(NamedTuple):
    """Who asks.

    name: for the audit log
    field: name and value of a form's hidden field
    cookie: what is to be set; empty: nothing
    is_in: whether there is a session that can be ended here
    may_enter: whether there are tokens, with which one could begin
    is_trusted: whether somebody else has checked that a form is this page's
    """

    token: Token
    name: str
    field: tuple[str, str]
    cookie: str = ""
    is_in: bool = False
    may_enter: bool = False
    is_trusted: bool = False

    def may(self, role: str, queue: str | None) -> bool:
        """Whether this is allowed for a queue; None: for all."""
        return self.token.allows(role, queue)


@dataclass(eq=False)
class Sessions:
    """Finds out who asks.

    names: names of this server, by which who has no token may look
    """

    _center: AsyncTimeoutCenter
    _tokens: Tokens
    _names: frozenset[str]

    def __post_init__(self) -> None:
        self._redis = AwaitedPart(self._center.center.client)
        self._key = self._center.center.keys.session
        #: the token of each session that was looked up, and when, by the monotonic clock
        self._known: dict[str, tuple[Token | None, float]] = {}

    async def visitor(self, request: Request) -> Visitor:
        """Who asks. Raises Problem for who may not even look, and if a token is used too often."""
        cookie = _cookie_of(request)
        if not self._tokens:
            return self._stranger(NOBODY, "this machine", cookie)
        token = await self._token_of(cookie) if cookie else None
        if token is not None:
            self._tokens.spend(token)
            return Visitor(token, token.name, (FIELD, _proof(cookie)), is_in=True, may_enter=True)
        anonymous = self._tokens.anonymous
        if anonymous is None:
            return self._stranger(_OUTSIDE, "", cookie)
        check_name(request, self._names)
        return self._stranger(anonymous, "", cookie)

    def _stranger(self, token: Token, name: str, cookie: str) -> Visitor:
        """Who has no session; the cookie is only for forms then."""
        new = "" if cookie else secrets.token_urlsafe(32)
        proof = _proof(cookie or new)
        return Visitor(token, name, (FIELD, proof), cookie=new, may_enter=bool(self._tokens))

    async def _token_of(self, cookie: str) -> Token | None:
        name = digest_of(cookie).hex()
        now = time.monotonic()
        known = self._known.get(name)
        if known is not None and known[0] is not None and not self._tokens.has(known[0]):
            del self._known[name]  # it was removed
            known = None
        if known is not None and now - known[1] < KNOWN:
            return known[0]
        try:
            raw = await self._redis.get(self._key(name))
        except (RedisError, TocError, OSError):
            if known is None:
                raise
            return known[0]  # the broker is away: who was in stays in
        token = None
        if raw is not None:
            said = json.loads(raw)
            token = self._tokens.named(said["name"])
            if token is not None and said["of"] != _mark(token):
                token = None  # another token has that name by now
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[name] = token, now
        return token

    async def enter(self, secret: str) -> tuple[Token, str]:
        """Begin a session with a token; the token and the cookie. Raises Problem."""
        token = self._tokens.check(f"Bearer {secret}")
        cookie = secrets.token_urlsafe(32)
        entry = json.dumps({"name": token.name, "of": _mark(token)})
        await self._redis.set(self._key(digest_of(cookie).hex()), entry, ex=LASTS)
        return token, cookie

    async def leave(self, request: Request) -> None:
        """End the session of a request; other processes know within seconds."""
        if cookie := _cookie_of(request):
            name = digest_of(cookie).hex()
            self._known.pop(name, None)
            await self._redis.delete(self._key(name))

    def check_form(self, request: Request, fields: dict[str, list[str]]) -> None:
        """Raises Problem for a form that was not sent from this page."""
        site = request.header(b"sec-fetch-site")
        if site and site not in ("same-origin", "none"):
            raise Problem("forbidden", "this form was sent from another site")
        cookie = _cookie_of(request)
        said = (fields.get(FIELD) or [""])[0]
        if not cookie or not hmac.compare_digest(_proof(cookie).encode(), said.encode()):
            raise Problem(
                "forbidden",
                "this form is not of this session; load the page again, with cookies allowed",
            )


#: Who has no token where one is needed.
_OUTSIDE = Token("", b"", (), (), is_anonymous=True)

#: Who could not be told, and may do nothing.
UNKNOWN = Visitor(_OUTSIDE, "", (FIELD, ""))


def cookie_header(
    name: str, value: str, request: Request, *, lasts: int | None = None
) -> tuple[bytes, bytes]:
    """The header that sets a cookie. It names no path: so it is that of the page, wherever a proxy
    has put it."""
    parts = [f"{cookie_name(name, request)}={value}", "HttpOnly", "SameSite=Strict"]
    if lasts is not None:
        parts.append(f"Max-Age={lasts}")
    if request.is_secure:
        parts.append("Secure")
    return b"set-cookie", "; ".join(parts).encode()


def cookie_name(name: str, request: Request) -> str:
    """The name of a cookie of the server that the browser speaks to: browsers give cookies of a
    host to all of its ports, and two servers must not take each other's."""
    port = port_of(request.header(b"host"))
    return f"{name}_{port}" if port else name


def _cookie_of(request: Request) -> str:
    found = read_cookie(request, cookie_name(COOKIE, request))
    return found if len(found) == _LENGTH and found.isascii() else ""


def read_cookie(request: Request, name: str) -> str:
    """What a cookie says; empty if it is not there.

    Other applications of this host have cookies, too, and one that is not as it should be must not
    hide this one, as it does for http.cookies. Of several, the one of the longest path comes first.
    """
    for part in request.header(b"cookie").split(";"):
        said, _, value = part.partition("=")
        if said.strip() == name:
            return value.strip()
    return ""


def _proof(cookie: str) -> str:
    """What a form has to say: who cannot read the cookie does not know it."""
    return digest_of(f"form\n{cookie}").hex()


def _mark(token: Token) -> str:
    """Tells a token from another one of its name."""
    return hashlib.sha256(b"session\n" + token.digest).hexdigest()[:32]


# -- what is not shown: arguments whose names say so, or all of them


#: What is shown instead.
HIDDEN = "••••"

#: Characters that a hidden value has at least if it is looked for in errors; what is shorter than
#: the second is looked for where it stands alone only: it is found everywhere.
_TELLING = 3
_ANYWHERE = 4

#: Characters by which the beginning of a hidden value is known: errors shorten what is long.
_BEGINNING = 8

#: An error of which nothing is known but its text: its type.
_TYPE = re.compile(r"[A-Za-z_][\w.]*(?=:|$)")

#: How deep arguments are looked through; what is deeper is hidden as a whole.
_DEPTH = 30

#: Names of the parameters of a task, in order; None if they are not known.
Parameters = Callable[[str], Sequence[str] | None]


class Mask:
    """Hides arguments.

    patterns: names of arguments, of members of objects and of headers, or patterns of these with
        ``*`` and ``?``, in any case; ``*`` hides all arguments
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self.patterns = tuple(one.lower() for one in patterns)
        self.hides_all = "*" in self.patterns
        self._named = tuple(one for one in self.patterns if one != "*")

    @classmethod
    def of(cls, said: Any) -> Mask:
        """The mask that a setting asks for: true, a name, or a list of names. Raises
        ConfigurationError."""
        if said in (None, False):
            return cls()
        if said is True:
            return cls(("*",))
        names = [said] if isinstance(said, str) else said
        if isinstance(names, (list, tuple, set, frozenset)) and all(
            isinstance(one, str) and one for one in names
        ):
            return cls(names)
        raise ConfigurationError(
            f"toc_web_mask must be true, or names of arguments such as ['password', '*token*'], "
            f"not {said!r}"
        )

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def hides(self, name: str) -> bool:
        return matches(name.lower(), self.patterns)

    def hides_header(self, name: str) -> bool:
        """Whether a header is hidden: ``*`` is about arguments, and leaves what a message is."""
        if name in _OPEN:
            return False
        return matches(name.lower(), self._named) or (self.hides_all and name not in _ABOUT)

    def error(self, text: str) -> str:
        """An error of a message whose arguments are not known: its type, and no more of it."""
        if not self or not text:
            return text
        lines = [line for line in text.splitlines() if line.strip()]
        found = _TYPE.match(lines[-1].strip()) if lines else None
        return HIDDEN if found is None else f"{found[0]}: {HIDDEN}"


class Masking:
    """Hides the arguments of one message, and remembers what was hidden.

    parameters: names of the parameters of a task
    """

    def __init__(self, mask: Mask, parameters: Parameters) -> None:
        self._mask = mask
        #: of a message whose arguments are not known
        self.error = mask.error
        self._parameters = parameters
        self._hidden: set[str] = set()

    def args(self, task: str | None, args: Any) -> Any:
        """Positional arguments. Without names for them, all are hidden."""
        mask = self._mask
        if not mask or not args:
            return args
        names = None if task is None or mask.hides_all else self._parameters(task)
        if not isinstance(args, (list, tuple)) or names is None:
            return self.hide(args)
        rest = [""] * max(len(args) - len(names), 0)
        return [
            self.hide(value) if not name or mask.hides(name) else self.value(value)
            for name, value in zip((*names, *rest), args, strict=False)
        ]

    def kwargs(self, kwargs: Any) -> Any:
        """Arguments by name."""
        if not self._mask or not kwargs:
            return kwargs
        return self.value(kwargs) if isinstance(kwargs, dict) else self.hide(kwargs)

    def members(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, with each name."""
        hides = self._mask.hides
        return {
            name: self.hide(value) if hides(name) else self.value(value)
            for name, value in kwargs.items()
        }

    def value(self, value: Any, depth: int = 0) -> Any:
        """A value whose members may have to be hidden."""
        if not self._mask:
            return value
        if self._mask.hides_all or depth > _DEPTH:
            return self.hide(value)
        if isinstance(value, dict):
            task = value.get("task")
            is_task = isinstance(task, str) and "args" in value
            made = {}
            for name, one in value.items():
                if self._mask.hides(str(name)):
                    made[name] = self.hide(one)
                elif is_task and name == "args":
                    made[name] = self.args(task, one)
                else:
                    made[name] = self.value(one, depth + 1)
            return made
        if isinstance(value, (list, tuple)):
            return [self.value(one, depth + 1) for one in value]
        return value

    def headers(self, headers: dict[str, Any]) -> dict[str, Any]:
        """Headers: those that repeat arguments are left out where something is hidden."""
        if not self._mask:
            return headers
        mask = self._mask
        return {
            name: self.hide(value)
            if mask.hides_header(name)
            else value
            if mask.hides_all
            else self.value(value)
            for name, value in headers.items()
            if name not in _REPEATING
        }

    def properties(self, properties: dict[str, Any]) -> dict[str, Any]:
        """What else a message has: ``*`` is about arguments."""
        return properties if self._mask.hides_all else self.members(properties)

    def text(self, text: Any) -> Any:
        """An error, or a key, in which what was hidden may stand: as it is, or as it is written in
        Python, in JSON or in a URL, or its beginning."""
        if not self._hidden or not text:
            return text
        forms = {form for one in self._hidden for form in _forms(one)}
        for form in sorted(forms, key=len, reverse=True):
            if len(form) < _ANYWHERE:
                text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", HIDDEN, text)
            else:
                text = _without(text, form)
        return text

    def result(self, value: Any, *, is_known: bool) -> Any:
        """What a task has returned: members of objects by their names, and texts.

        is_known: whether the arguments of the task are known, and :meth:`args` and :meth:`kwargs`
            have hidden some: texts are shown without these. Otherwise a text may repeat any of
            them, and is shown only where it is a member, which has a name
        """
        return self._result(self.value(value), is_known) if self._mask else value

    def _result(self, value: Any, is_shown: bool, depth: int = 0) -> Any:
        if depth > _DEPTH:
            return self.hide(value)
        if isinstance(value, dict):
            return {name: self._result(one, True, depth + 1) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._result(one, is_shown, depth + 1) for one in value]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return HIDDEN if str(value) in self._hidden else value
        if not isinstance(value, str):
            return value
        if value[:1] in ("{", "["):  # perhaps JSON in a text
            try:
                inner = json.loads(value)
            except (ValueError, RecursionError):
                inner = None
            if isinstance(inner, (dict, list)):
                masked = self._result(self.value(inner), is_shown, depth + 1)
                return value if masked == inner else json.dumps(masked, ensure_ascii=False)
        return self.text(value) if is_shown else HIDDEN

    def hide(self, value: Any) -> Any:
        """A value that is not shown, nor where an error repeats it."""
        self._note(value, 0)
        return HIDDEN

    def _note(self, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            members: Iterable[Any] = value.values()
        elif isinstance(value, (list, tuple)):
            members = value
        elif value is None or isinstance(value, bool):
            return
        else:
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
            for said in (text, *text.splitlines()):
                if len(said) >= _TELLING and len(self._hidden) < 1000:
                    self._hidden.add(said)
            return
        if depth < _DEPTH:
            for one in members:
                self._note(one, depth + 1)


#: Headers of Celery's that repeat arguments.
_REPEATING = ("argsrepr", "kwargsrepr")

#: Headers of Celery's that say what a message is, and are always shown.
_OPEN = (
    "id",
    "task",
    "lang",
    "eta",
    "expires",
    "retries",
    "timelimit",
    "root_id",
    "parent_id",
    "group",
    "origin",
)

#: Headers of which the same is true, and which hold what their sender has put there: a pattern that
#: names them hides them.
_ABOUT = (*_OPEN, "x-biz-id", "x-biz-type", "x-key")


def _forms(value: str) -> Iterable[str]:
    """How a value is written in errors."""
    return {
        value,
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        quote(value, errors="replace"),
    }


def _without(text: str, hidden: str) -> str:
    """Text without a value, and without what begins as it does."""
    head, tail = hidden[:_BEGINNING], hidden[_BEGINNING:]
    parts, done = [], 0
    while (at := text.find(head, done)) >= 0:
        parts += [text[done:at], HIDDEN]
        end = at + len(head)
        done = end + sum(takewhile(bool, map(eq, text[end : end + len(tail)], tail)))
    return "".join((*parts, text[done:]))


# -- the audit log: who has done what over HTTP or on the page, and to how many
#
# An entry is a line of the logger ``kombu_toc.audit``, and an entry of a stream in Redis, which
# the page shows.

_audit_logger = logging.getLogger("kombu_toc.audit")


#: Entries that are kept, about.
KEPT = 10_000

#: Characters of what an entry says.
MOST = 2_000

#: Refusals that are logged in a minute, at most: anybody can have one.
MOST_REFUSALS = 100


class Entry(NamedTuple):
    """What somebody has done.

    us: when, microseconds since the epoch
    number: how many messages it was done to; -1: it is not about messages
    """

    us: int
    who: str
    act: str
    queue: str
    what: str
    number: int


class Audit:
    """Writes and reads the log."""

    def __init__(self, center: AsyncTimeoutCenter) -> None:
        self._center = center
        #: since when refusals are counted, and how many there were
        self._since = 0.0
        self._refusals = 0

    async def write(
        self, who: str, act: str, queue: str = "", what: str = "", number: int = -1
    ) -> None:
        """Note what was done. It was done: if Redis cannot be told, the logger has it."""
        what = what[:MOST]
        about = f", {what}" if what else ""
        how_many = f": {number}" if number >= 0 else ""
        _audit_logger.info("%s", one_line(f"{who}: {act}{_place(queue)}{about}{how_many}"))
        entry = json.dumps([who, act, queue, what, number])
        try:
            await self._center.call(
                lambda center: center.client.xadd(
                    center.keys.audit, {b"e": entry}, maxlen=KEPT, approximate=True
                )
            )
        except (RedisError, TocError, OSError) as exc:
            _audit_logger.warning(
                "the audit log lacks an entry, the broker cannot be told: %s", exc
            )

    @asynccontextmanager
    async def doing(
        self, who: str, act: str, queue: str = "", what: str = ""
    ) -> AsyncIterator[SimpleNamespace]:
        """Note what is done within, also if it fails on the way: it may be done then, in part or
        as a whole. A Problem says that nothing was done. What it yields is told the `queue`, and
        the `number` of messages."""
        doing = SimpleNamespace(queue=queue, number=-1)
        try:
            yield doing
        except Problem:
            raise
        except Exception as exc:
            why = f"failed: {problem_of(exc).detail}"
            what = f"{why}; {what}" if what else why
            await self.write(who, act, doing.queue, what, doing.number)
            raise
        await self.write(who, act, doing.queue, what, doing.number)

    def refused(self, who: str, act: str, queue: str, why: str) -> None:
        """Note what was not done because somebody may not do it: for the logger only, or who may do
        nothing could push out of Redis what was done. Of very many in a minute, some."""
        now = time.monotonic()
        if now - self._since > 60:
            self._since, self._refusals = now, 0
        self._refusals += 1
        if self._refusals > MOST_REFUSALS:
            if self._refusals == MOST_REFUSALS + 1:
                _audit_logger.warning("what else is refused in this minute is not logged")
            return
        said = f"{who or 'somebody'}: {act[:100]}{_place(queue[:MOST])} is refused: {why}"
        _audit_logger.warning("%s", one_line(said))

    async def read(self, limit: int, before: str = "") -> tuple[list[Entry], str]:
        """The latest entries, and what goes on behind them; empty: nothing does.

        before: that of a page before
        """
        top = f"({before}" if before else "+"
        raw: list[Any] = await self._center.call(
            lambda center: center.client.xrevrange(center.keys.audit, top, "-", count=limit)
        )
        entries = []
        for name, fields in raw:
            said = json.loads(fields[b"e"])
            entries.append(Entry(int(name.split(b"-")[0]) * 1000, *said))
        return entries, raw[-1][0].decode() if len(raw) == limit else ""


def _place(queue: str) -> str:
    return f" in {queue!r}" if queue else ""
