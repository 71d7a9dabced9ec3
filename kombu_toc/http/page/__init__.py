"""The page: what a person sees of a timeout center, and does to it, in a browser. This module finds
the view of a request, and answers.

Its HTML is in ``templates``, and escaped by Jinja2 (:mod:`.presentation`); one small script looks
again and knows keys (``page.js``). Nothing is loaded from anywhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..fields import Problem, not_found, problem_of, retry_after
from ..request import Answer, Gone, Operation, Request, read_pairs
from ..tokens import COOKIE, LASTS, UNKNOWN, Mask, Visitor, cookie_header
from . import overview, presentation, queue, schedules
from .presentation import (
    FILES,
    HEADERS,
    HTML,
    Ask,
    View,
    decoded,
    file_of,
    page_of,
    redirect,
    render,
)
from .snapshots import FirstLook, Tools, Viewing

logger = logging.getLogger(__name__)

#: Where it is, below where the application is mounted.
ROOT = "page"

#: Seconds that a view may take; the script waits for ten.
WITHIN = 7.0

#: Fields of a form, and its bytes, at most.
MAX_FIELDS = 3_000
MAX_FORM = 1 << 20

#: Bytes of a form of who has not signed in: no more are kept.
MAX_ENTRANCE = 16 << 10

VIEWS: Mapping[str, Viewing] = {
    "": overview.overview,
    "queue": queue.queue,
    "message": queue.message,
    "job": queue.job,
    "jobs": queue.jobs,
    "failures": queue.failures,
    "dead": overview.dead,
    "limits": queue.limits,
    "schedules": schedules.schedules,
    "send": schedules.send,
    "library": overview.library,
    "search": overview.search,
    "audit": overview.audit,
}

#: What forms are sent to.
FORMS: Mapping[str, Viewing] = {
    "do": queue.do,
    "all": queue.begin_all,
    "pause": queue.pause,
    "job": queue.control,
    "failures": queue.change_failures,
    "limits": queue.change_limits,
    "schedules": schedules.change,
    "send": schedules.send_task,
}


class Page:
    """The page of an application.

    api: the application
    extras: what it can show beside what every center has
    mask: what is not shown
    """

    def __init__(self, api: Any, extras: presentation.PageExtras, mask: Mask) -> None:
        self.tools = Tools(api, extras, mask)
        self.aclose = self.tools.aclose

    # -- as operations of the application

    def operations(self) -> Iterable[Operation]:
        """What the application is asked for; none is in the OpenAPI document."""

        def made(method: str, path: tuple[str, ...], run: Any) -> Operation:
            return Operation(method, path, run, "The page", role="", is_shown=False)

        async def to_page(api: Any, request: Request) -> Answer:
            return Answer(b"", 303, HTML, (*HEADERS, (b"location", b"page/")))

        yield made("GET", ("",), to_page)
        yield made("GET", (ROOT,), to_page)
        for name in FILES:
            yield made("GET", (ROOT, name), partial(_file, name))
        for name in (*VIEWS, "login"):
            yield made("GET", (ROOT, name), partial(self._answer, name))
        for name in (*FORMS, "login", "leave"):
            posted = made("POST", (ROOT, name), partial(self._answer, name))
            yield replace(posted, reads=True)

    async def _answer(self, name: str, api: Any, request: Request) -> Answer:
        visitor = UNKNOWN
        try:
            visitor = await self.tools.sessions.visitor(request)
            if request.method == "POST":
                is_in = visitor.token.roles and not visitor.token.is_anonymous
                await request.read_body(MAX_FORM if is_in and name != "login" else MAX_ENTRANCE)
        except Gone:
            raise
        except Exception as exc:
            return self._failed(Ask(request, visitor, request.query, {}), exc)
        return await self.answer(name, request, visitor)

    # -- for whoever knows who asks

    async def answer(self, name: str, request: Request, visitor: Visitor) -> Answer:
        """The answer to a request for a view, or that sends a form.

        name: of the view
        request: with its body, if it has one
        visitor: who asks. That a form was sent from this page is checked here only where the
            visitor has a session of this page
        """
        ask = Ask(request, visitor, request.query, {})
        try:
            if name in FILES:
                return await _file(name, self.tools.api, request)
            if request.method not in ("GET", "HEAD", "POST"):
                raise Problem("method-not-allowed", f"{request.method[:20]} cannot be done here")
            if request.method != "POST":
                # A form that looks for something sends its fields so.
                query = dict(decoded(request.query.items(), "the query of the URL cannot be read"))
                return await self._view(name, ask._replace(query=query))
            ask = ask._replace(fields=_fields_of(request))
            if not visitor.is_trusted:
                self.tools.sessions.check_form(request, dict(ask.fields))
            if name == "login":
                return await self._enter(ask)
            if name == "leave":
                return await self._leave(ask)
            if visitor.token.is_anonymous:
                raise Problem("unauthorized", "sign in to do this")
            if name not in FORMS:
                raise not_found("nothing can be sent there")
            made = await FORMS[name](self.tools, ask)
            return made if isinstance(made, Answer) else self._page(ask, made)
        except Exception as exc:
            if isinstance(exc, Problem) and exc.kind in ("forbidden", "unauthorized"):
                self._note_refused(name, ask, exc)
            return self._failed(ask, exc)

    def _note_refused(self, name: str, ask: Ask, problem: Problem) -> None:
        if ask.request.method == "POST":
            act = " ".join(filter(None, (name, ask.field("act"))))
            who = ask.visitor.name
            self.tools.audit.refused(who, act, ask.field("queue"), problem.detail)

    async def _view(self, name: str, ask: Ask) -> Answer:
        if name == "login":
            return self._page(ask, _ENTRANCE)
        if not ask.visitor.token.roles:
            if ask.request.header(b"sec-fetch-site") == "cross-site":
                # A link elsewhere leads here without the cookie; a reload has it.
                return Answer(render("again").encode(), 200, HTML, HEADERS)
            return self._page(ask, _ENTRANCE._replace(status=401))
        if name not in VIEWS:
            raise not_found("there is no such view")
        try:
            # Those that ask the task library, too, take what its database takes.
            within = None if name in ("message", "library", "search") else WITHIN
            made = await asyncio.wait_for(VIEWS[name](self.tools, ask), within)
        except asyncio.TimeoutError:
            said = f"the broker has not answered for {WITHIN:g} seconds"
            raise Problem("broker", said, headers=retry_after(1)) from None
        return made if isinstance(made, Answer) else self._page(ask, made)

    def _page(self, ask: Ask, view: View) -> Answer:
        return page_of(ask, view, self.tools.api.has_library)

    def _failed(self, ask: Ask, exc: Exception) -> Answer:
        """What is answered if something went wrong: a page that says what, and the way on."""
        if isinstance(exc, FirstLook):
            look = {"seen": exc.seen, "of": exc.of}
            return self._page(ask, View("One moment", "first", look, every=1_000))
        problem = problem_of(exc)
        away = problem.kind == "broker"
        view = View(
            problem.title,
            "failed",
            {"detail": problem.detail},
            every=2_000 if away and ask.request.method == "GET" else 0,
            trouble=f"{problem.detail}." if away else "",
            status=problem.status,
        )
        made = self._page(ask, view)
        return made._replace(headers=(*made.headers, *problem.headers))

    # -- coming and going

    async def _enter(self, ask: Ask) -> Answer:
        secret = ask.field("token").strip()
        try:
            token, cookie = await self.tools.sessions.enter(secret)
        except Problem as problem:
            if problem.kind != "unauthorized":
                raise
            self._note_refused("login", ask, problem)
            return self._page(
                ask,
                _ENTRANCE._replace(values={"wrong": "This token is not known here."}, status=401),
            )
        await self.tools.sessions.leave(ask.request)  # of a session that this browser has had
        await self.tools.audit.write(token.name, "sign in")
        return redirect(ask, "./", "", cookie_header(COOKIE, cookie, ask.request, lasts=LASTS))

    async def _leave(self, ask: Ask) -> Answer:
        await self.tools.sessions.leave(ask.request)
        if ask.visitor.is_in:
            await self.tools.audit.write(ask.visitor.name, "sign out")
        return redirect(ask, "./", "", cookie_header(COOKIE, "", ask.request, lasts=0))


_ENTRANCE = View("Sign in", "login", {"wrong": ""})


def _fields_of(request: Request) -> dict[str, list[str]]:
    """The fields of a form. Raises Problem."""
    if request.media_type != "application/x-www-form-urlencoded":
        raise Problem("unsupported-media-type", "forms are sent as a browser sends them")
    if len(request.body) > MAX_FORM:
        raise Problem("too-large", f"a form may have {MAX_FORM} bytes")
    fields: dict[str, list[str]] = {}
    unread = "the form cannot be read"
    for name, value in decoded(read_pairs(request.body, MAX_FIELDS, unread), unread):
        fields.setdefault(name, []).append(value)
    return fields


async def _file(name: str, api: Any, request: Request) -> Answer:
    """A file beside the pages. Its address has its version, so it may be kept."""
    content, version = file_of(name)
    kept = b"public, max-age=31536000, immutable"
    cache = kept if request.query.get("v") == version else b"no-cache"
    return Answer(content, 200, FILES[name], cache=cache)
