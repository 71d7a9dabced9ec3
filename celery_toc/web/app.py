"""The application of an app."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import kombu_toc
from kombu_toc.http import HttpApi, Tokens, api_for

from .. import aio
from . import schedules, tasks

if TYPE_CHECKING:
    from celery import Celery


def api_for_app(
    app: Celery,
    *,
    tokens: Tokens | None = None,
    allow: Iterable[str] = (),
    names: Iterable[str] = (),
    keep_answers: float = 3600.0,
) -> HttpApi:
    """The HTTP API of an app's broker: an ASGI application, to be served or mounted.

    tokens: who may do what; without any, only requests from this machine are answered
    allow: names of tasks that may be sent, or patterns with ``*``; none unless given
    names: names of this server, by which who has no token may read, where that is allowed
    keep_answers: seconds for which answers are kept under an Idempotency-Key

    Raises ConfigurationError if the app's broker is no timeout center.
    """
    with app.connection_for_write() as connection:
        url = connection.as_uri(include_password=True)
        if not isinstance(connection.transport, kombu_toc.Transport):
            raise kombu_toc.ConfigurationError(
                f"the broker of app {app.main!r} is {kombu_toc.mask_password(url)}, which is not a "
                "timeout center: such a URL begins with toc+, as in toc+redis://localhost:6379/0"
            )
        ssl, options = connection.ssl, connection.transport_options
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
        ssl=ssl,
        **options,
    )
