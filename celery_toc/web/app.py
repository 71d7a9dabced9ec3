"""The application of an app."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kombu_toc.http import HttpApi, Tokens, api_for

from .. import aio
from ..app.broker import broker_of
from . import page, schedules, tasks

if TYPE_CHECKING:
    from celery import Celery


def api_for_app(
    app: Celery,
    *,
    tokens: Tokens | None = None,
    allow: Iterable[str] = (),
    names: Iterable[str] = (),
    keep_answers: float = 3600.0,
    beside: Iterable[Any] = (),
    mask: Iterable[str] = (),
) -> HttpApi:
    """The HTTP API of an app's broker, and its page: an ASGI application, to be served or mounted.

    tokens: who may do what; without any, only requests from this machine are answered
    allow: names of tasks that may be sent, or patterns with ``*``; none unless given
    names: names of this server, by which who has no token may read, where that is allowed
    keep_answers: seconds for which answers are kept under an Idempotency-Key
    beside: what runs while the application does, such as :func:`kombu_toc.notify.beside`
    mask: names of arguments that are hidden on the page, and from tokens that may not write; or
        patterns; beside ``toc_web_mask``

    Raises ConfigurationError if the app's broker is no timeout center.
    """
    url, ssl, options = broker_of(app)
    allowed = tasks.Allowed(app, allow)
    operations = [*tasks.operations(allowed), *schedules.operations(app, allowed)]

    async def close() -> None:
        await aio.aclose(app)

    return api_for(
        url,
        tokens=tokens,
        operations=operations,
        on_close=(close,),
        check_message=allowed.check_message,
        names=names,
        keep_answers=keep_answers,
        beside=beside,
        extras=page.AppExtras(app),
        mask=page.mask_of(app, tuple(mask)),
        ssl=ssl,
        **options,
    )
