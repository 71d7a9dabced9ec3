"""Who looks at the page: a session in a cookie, begun with a token; and forms that no other site
can send.

A session is a random cookie, and an entry in Redis under its hash that names the token. So each
process of several knows it, and what is kept, there or in the file of tokens, lets nobody in.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from dataclasses import dataclass
from typing import NamedTuple

from redis.exceptions import RedisError

from ...aio.center import AsyncTimeoutCenter
from ...aio.client import AwaitedPart
from ...errors import TocError
from ..fields import Problem
from ..request import Request, check_name, port_of
from ..tokens import NOBODY, Token, Tokens

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
        name = _hash(cookie)
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
        await self._redis.set(self._key(_hash(cookie)), entry, ex=LASTS)
        return token, cookie

    async def leave(self, request: Request) -> None:
        """End the session of a request; other processes know within seconds."""
        if cookie := _cookie_of(request):
            name = _hash(cookie)
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


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _proof(cookie: str) -> str:
    """What a form has to say: who cannot read the cookie does not know it."""
    return _hash(f"form\n{cookie}")


def _mark(token: Token) -> str:
    """Tells a token from another one of its name."""
    return hashlib.sha256(b"session\n" + token.digest).hexdigest()[:32]
