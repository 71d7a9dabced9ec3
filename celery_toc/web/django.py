"""The page within Django, behind its admin's log-in and its permissions::

    path("admin/toc/", include("celery_toc.web.django")),  # before path("admin/", ...)

It is the page of the current app of Celery; ``urls_for(app)`` makes the addresses for another one.
Whoever is staff and has a permission of ``celery_toc.django`` may look (``read_center``), move and
cancel messages (``write_center``), or change queues and schedules (``operate_center``); superusers
may do everything.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from celery import current_app
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.middleware.csrf import get_token
from django.urls import NoReverseMatch, re_path, reverse
from django.views.decorators.csrf import csrf_protect

from kombu_toc.http import Answer, Request, Token, Visitor

from . import api_for_app, load_tasks

if TYPE_CHECKING:
    from celery import Celery

#: Seconds that an answer may take.
WITHIN = 60.0

#: role -> the permission that allows it
PERMISSIONS = {
    "read": "celery_toc.read_center",
    "write": "celery_toc.write_center",
    "operate": "celery_toc.operate_center",
}


def urls_for(app: Celery | Callable[[], Celery]) -> list[Any]:
    """The addresses of the page of an app, for ``include``.

    app: it, or what returns it when it is needed
    """
    served = _Served(app)

    @csrf_protect
    def page(request: HttpRequest, name: str) -> HttpResponse:
        user = request.user
        if not user.is_authenticated:
            return redirect_to_login(request.get_full_path(), _login_url())
        visitor = visitor_of(request)
        if not visitor.token.roles:
            raise PermissionDenied
        try:
            return _response(served.answer(name, _request_of(request), visitor))
        except (TimeoutError, concurrent.futures.TimeoutError):
            return HttpResponse(f"There is no answer after {WITHIN:g} seconds.", status=503)

    return [re_path(r"^(?P<name>[a-z.]*)$", page, name="celery_toc_page")]


def visitor_of(request: HttpRequest) -> Visitor:
    """What the user of a request may do."""
    user: Any = request.user
    roles: list[str] = []
    if user.is_active and user.is_staff:
        roles = [role for role, permission in PERMISSIONS.items() if user.has_perm(permission)]
    name = str(user.get_username())
    token = Token(name, b"", roles, ("*",))
    return Visitor(token, name, ("csrfmiddlewaretoken", get_token(request)), is_trusted=True)


def _login_url() -> str | None:
    """The admin's, if it is there; else that of the settings."""
    try:
        return str(reverse("admin:login"))
    except NoReverseMatch:
        return None


def _request_of(request: HttpRequest) -> Request:
    """A request as the page knows it."""
    headers = [
        (name.lower().encode("latin-1"), str(said).encode("latin-1", "replace"))
        for name, said in request.headers.items()
    ]
    scope = {
        "method": request.method or "GET",
        "headers": headers,
        "query_string": request.META.get("QUERY_STRING", "").encode("latin-1", "replace"),
        "scheme": request.scheme or "http",
    }
    made = Request(scope, _nothing, [])
    made.body = request.body
    return made


async def _nothing() -> Any:
    return {"type": "http.disconnect"}


def _response(answer: Answer) -> HttpResponse:
    response = HttpResponse(
        answer.body, status=answer.status, content_type=answer.content_type.decode()
    )
    response["Cache-Control"] = answer.cache.decode()
    response["X-Content-Type-Options"] = "nosniff"
    for name, said in answer.headers:
        response[name.decode().title()] = said.decode("latin-1")
    return response


class _Served:
    """The page of an app, in a thread of this process that has an event loop: Django's own views
    have none that stays.

    app: it, or what returns it
    """

    def __init__(self, app: Celery | Callable[[], Celery]) -> None:
        self._app = app
        self._lock = threading.Lock()
        #: of the process that has begun it: a child has none of its threads
        self._process = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._api: Any = None

    def answer(self, name: str, request: Request, visitor: Visitor) -> Answer:
        """The page's answer."""
        loop = self._running()
        coroutine = self._api.page.answer(name, request, visitor)
        answering = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            found: Answer = answering.result(WITHIN)
        finally:
            answering.cancel()  # if it takes too long
        return found

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._process != os.getpid():
                app = self._app if hasattr(self._app, "conf") else self._app()
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="toc-page", daemon=True).start()
                load_tasks(app)
                self._api = api_for_app(app)
                self._loop, self._process = loop, os.getpid()
                atexit.register(self._close)
            return self._loop

    def _close(self) -> None:
        """End the connections; in the process that has made them."""
        loop = self._loop
        if loop is None or self._process != os.getpid():
            return
        with suppress(Exception):  # the process ends anyway, and with it what is open
            asyncio.run_coroutine_threadsafe(self._api.aclose(), loop).result(2)
        loop.call_soon_threadsafe(loop.stop)


urlpatterns = urls_for(lambda: current_app._get_current_object())
