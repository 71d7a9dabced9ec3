"""The ASGI application: from a request to an operation, and from what it does to an answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterable
from functools import cached_property, partial
from typing import Any, NamedTuple
from urllib.parse import quote

from redis.exceptions import RedisError

from ..aio.center import AsyncTimeoutCenter
from ..aio.client import AwaitedPart
from ..center.center import TimeoutCenter
from ..client.errors import BROKEN, is_demoted, is_temporary
from ..errors import ServerError
from ..library.opening import center_for
from ..model.results import Found
from ..version import __version__
from . import fields, library, pull, queues, tasks
from . import request as asgi
from .messages import DecompressionBudget, is_event, shown_found, shown_masked
from .page import Page
from .page.presentation import PageExtras
from .pull import LongPolls
from .request import Answer, Request
from .tokens import MOST, NOBODY, Audit, Mask, Masking, Token, Tokens, check_role

# -- what runs in the event loop of a server, beside its requests

#: Runs until an event is set.
Run = Callable[[asyncio.Event], Awaitable[None]]

#: Makes that for a center.
Beside = Callable[[AsyncTimeoutCenter], Run]


async def _guarded(run: Run, until: asyncio.Event) -> None:
    try:
        await run(until)
    except Exception:
        logger.exception("what runs beside the requests has failed")


# -- the OpenAPI document, made from the operations; python -m kombu_toc.http --openapi writes it

_ABOUT = """Messages that become visible at their action time, and tasks of Celery, for any
language. Errors are problems (RFC 9457). Times are RFC 3339, durations are seconds."""


def document(router: asgi.Router) -> dict[str, Any]:
    """The document of these operations."""
    schemas: dict[str, Any] = {"Problem": fields.SCHEMA}
    paths: dict[str, dict[str, Any]] = {}
    for one in router.operations:
        if not one.is_shown:
            continue
        described = _described(one, schemas)
        paths.setdefault(one.shown_path, {})[one.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "celery-toc",
            "version": __version__,
            "description": " ".join(_ABOUT.split()),
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {
                f"Problem{status}": {
                    "description": " Or: ".join(f"{fields.KINDS[kind][1]}." for kind in kinds),
                    "content": {
                        "application/problem+json": {
                            "schema": {"$ref": "#/components/schemas/Problem"}
                        }
                    },
                }
                for status, kinds in asgi.statuses_of(fields.KINDS).items()
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(one: asgi.Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": f"{one.subject}.{one.method.lower()}"
        f".{'.'.join(part.strip('{}') for part in one.path[1:]) or one.path[0]}"
        f"{'.' if one.verb else ''}{one.verb}",
        "summary": one.summary,
    }
    said = [one.about] if one.about else []
    if one.role:
        said.append(f"Needs the role {one.role}: {asgi.ROLES[one.role]}.")
        made["security"] = [{}, {"token": []}]
    made["description"] = " ".join(said)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": asgi.PARAMETERS[name].schema()}
        for name in one.parameters
    ]
    parameters += [
        {"name": name, "in": "query", "schema": kind.schema()} for name, kind in one.query.items()
    ]
    if one.idempotent_by_key:
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "A repeated request with the same key gets the same answer.",
                "schema": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 255,
                    "pattern": "^[!-~](?:[ -~]*[!-~])?$",
                },
            }
        )
    if parameters:
        made["parameters"] = parameters
    if one.request is not None:
        content = {"application/json": {"schema": _schema(one.request, schemas)}}
        content.update({name: {"schema": dict(schema)} for name, schema in one.media.items()})
        made["requestBody"] = {"required": one.required, "content": content}
    made["responses"] = {
        str(status): {
            "description": about,
            "content": {one.text or "application/json": {"schema": dict(schema)}},
        }
        for status, (about, schema) in one.answers.items()
    }
    kinds = [*asgi.EVERYWHERE, *one.problems] if one.role else ["bad-request", "broker", "internal"]
    if one.request is not None:
        kinds.append("unsupported-media-type")
    if one.idempotent_by_key:
        kinds += ["conflict", "key-reused"]
    for status in sorted(asgi.statuses_of(dict.fromkeys(kinds))):
        made["responses"][str(status)] = {"$ref": f"#/components/responses/Problem{status}"}
    return made


def _schema(fields: fields.Object, schemas: dict[str, Any]) -> dict[str, Any]:
    if not fields.name:
        return fields.schema()
    schemas[fields.name] = fields.schema()
    return {"$ref": f"#/components/schemas/{fields.name}"}


# -- the ASGI application
#
# It uses nothing of a framework: paths are matched as they were sent, so a name may have a slash or
# a colon in it, and a request costs little beside what it asks of the broker.

logger = logging.getLogger(__name__)

#: Bytes of a body.
MAX_BODY = 16 << 20

#: Methods whose bodies are read; of others they are thrown away.
WITH_BODY = ("POST", "PUT", "PATCH", "DELETE")

#: The status of an answer to a body that is larger: the rest of it was not read.
TOO_LARGE = 413

#: Seconds within which the broker must answer to be ready.
READY_WITHIN = 5.0

#: Seconds for which answers are kept under an Idempotency-Key.
KEEP_ANSWERS = 3600.0

#: A header of every answer: it is what it says that it is.
_ALWAYS = (b"x-content-type-options", b"nosniff")


class HttpApi:
    """The application. It belongs to one event loop, and connects when it is first used.

    center: the center whose messages these are
    tokens: who may do what; without any, only requests from this machine are answered
    recorded: a center with a task library, whose methods block: what is cancelled and moved is
        recorded there
    operations: more than those of every center
    on_close: awaited when the application ends
    keep_answers: seconds for which answers are kept under an Idempotency-Key
    check_message: is told the id and the bytes of each message before it is put; it raises a
        Problem for one that may not be
    names: names of this server, by which who has no token may read, where that is allowed
    beside: what runs while the application does, made of its center; told by an event to end
    extras: what the page shows beside what every center has
    mask: what is hidden of messages: on the page, and from tokens that may not write
    """

    def __init__(
        self,
        center: AsyncTimeoutCenter,
        *,
        tokens: Tokens | None = None,
        recorded: TimeoutCenter | None = None,
        operations: Iterable[asgi.Operation] = (),
        on_close: Iterable[Callable[[], Awaitable[None]]] = (),
        keep_answers: float = KEEP_ANSWERS,
        check_message: Callable[[str, bytes], None] | None = None,
        names: Iterable[str] = (),
        beside: Iterable[Beside] = (),
        extras: PageExtras | None = None,
        mask: Mask | None = None,
    ) -> None:
        self.center = center
        self.tokens = tokens or Tokens()
        self.long_polls = LongPolls(center, len(self.tokens.tokens))
        self._idempotency = Idempotency(center, keep_answers)
        self.check_message = check_message
        self.names = frozenset(name.lower() for name in names)
        self._recorded = recorded
        #: whether there is a task library
        self.has_library = recorded is not None
        self._on_close = tuple(on_close)
        self._runs = [make(center) for make in beside]
        self._until = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []
        #: what cancels and moves messages, so that the library knows
        self.acting: Any = center if recorded is None else _InThreads(recorded)
        self.audit = Audit(center)
        self.extras = extras or PageExtras()
        self._mask = mask or Mask()
        self.page = Page(self, self.extras, self._mask)
        self.router = asgi.Router((*OPERATIONS, *operations, *self.page.operations()))

    async def aclose(self) -> None:
        """Answer all who wait, and close the connections to the broker."""
        await self.long_polls.aclose()
        self._until.set()
        if self._running:
            await asyncio.wait(self._running)
        await self.page.aclose()
        await self.center.aclose()
        for close in self._on_close:
            await close()
        if self._recorded is not None:
            self._recorded.client.close()

    # -- for operations

    async def known_queue(self, queue: str) -> str:
        """A queue that somebody has declared. Raises Problem for any other."""
        if await self.center.registry.declared(queue) is None:
            raise fields.not_found(f"there is no queue {queue!r}")
        return queue

    async def ask_library(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the task library, in a thread. Raises Problem if there is none."""
        if self._recorded is None:
            raise fields.not_found("there is no task library: set toc_library in the broker's URL")
        return await asyncio.to_thread(getattr(self._recorded.library, method), *args, **options)

    def masking_for(self, token: Token, queue: str | None = None) -> Masking | None:
        """What hides arguments of messages of a queue, or of all, from a token: who may write may
        lease them, and gets them as they are. None: nothing is hidden."""
        if not self._mask or token.allows("write", queue):
            return None
        return Masking(self._mask, self.extras.parameters)

    def shown(
        self,
        token: Token,
        found: Found,
        *,
        with_body: bool = True,
        budget: DecompressionBudget | None = None,
    ) -> dict[str, Any]:
        """A message that was found, as a token sees it."""
        if self.masking_for(token, found.topic) is None:
            return shown_found(found, with_body=with_body, budget=budget)
        reading = self.page.tools.reader
        return shown_masked(
            found, reading.read(found, 0, budget or DecompressionBudget()), with_body=with_body
        )

    @cached_property
    def document(self) -> Any:
        """The OpenAPI document, for an application that is not mounted."""
        return document(self.router)

    # -- ASGI

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            connection = asgi.current()
            if connection is not None:
                connection.begin()
            try:
                await self._serve(scope, receive, send)
            finally:
                if connection is not None:
                    connection.end()
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _live(self, receive: asgi.Receive, send: asgi.Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._running = [
                    asyncio.create_task(_guarded(run, self._until)) for run in self._runs
                ]
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _serve(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        request, is_admitted = None, False
        connection = asgi.current()
        try:
            request = self._read(scope, receive)
            self._admit(scope, request)
            is_admitted = True
            made = await self._answer(request)
        except asgi.Gone:
            if connection is None:
                return
            made = asgi.Answer(b"", 408)  # for nobody; but the server wants one
        except Exception as exc:
            problem = fields.problem_of(exc)
            if request and request.operation.is_shown and problem.kind in _REFUSALS:
                self._note_refused(scope, request, problem)
            made = as_answer(problem)
        is_unread = asgi.has_body(scope) and (
            not is_admitted or made.status == TOO_LARGE or scope["method"] not in WITH_BODY
        )
        if made.undo is not None and request is not None and await _has_gone(request):
            await made.undo()
            if connection is None:
                return
            made = asgi.Answer(b"", 408)  # as above
        headers = [
            (b"content-type", made.content_type),
            (b"content-length", str(len(made.body)).encode()),
            (b"cache-control", made.cache),
            _ALWAYS,
            *made.headers,
        ]
        if asgi.CLOSE not in made.headers and any(
            name == b"upgrade" for name, _ in scope["headers"]
        ):
            # Nothing is upgraded here, and a server may read no further request after it.
            headers.append(asgi.CLOSE)
        try:
            await send({"type": "http.response.start", "status": made.status, "headers": headers})
            body = b"" if scope["method"] == "HEAD" else made.body
            if is_unread:
                # Closed with a part of the body unread, a connection is reset, and a client that
                # still sends may never see the answer.
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asgi.discard_body(receive)
                body = b""
            await send({"type": "http.response.body", "body": body})
            gone = connection is not None and connection.lost.is_set()
            if connection is not None and made.undo is not None and not gone:
                gone = not await connection.wait_until_sent()
        except OSError:
            gone = True
        if gone and made.undo is not None:  # the client has gone away meanwhile
            await made.undo()

    def _read(self, scope: asgi.Scope, receive: asgi.Receive) -> asgi.Request:
        """The request, which knows its operation and its path. Raises Problem."""
        if sum(len(name) + len(said) for name, said in scope["headers"]) > asgi.MAX_HEADERS:
            raise fields.Problem("headers-too-large", f"headers may have {asgi.MAX_HEADERS} bytes")
        if (
            len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
            > asgi.MAX_TARGET
        ):
            raise fields.Problem("bad-request", f"path and query may have {asgi.MAX_TARGET} bytes")
        parts, verb = asgi.path_of(scope, self.router.verbs)
        operation = self.router.find(scope["method"], parts, verb)
        request = asgi.Request(scope, receive, asgi.read_parameters(operation, parts))
        request.operation, request.path = operation, f"{'/'.join(parts)}:{verb}"
        return request

    def _admit(self, scope: asgi.Scope, request: asgi.Request) -> None:
        """Raises Problem for a request that may not be answered, or that says what nobody knows."""
        operation = request.operation
        if len(request.headers) != len(scope["headers"]):
            asgi.check_single(scope)
        if not self.tokens:
            asgi.check_local(scope, request)
        if operation.role:
            request.token = self.tokens.check(request.header(b"authorization"))
            if not (operation.many_queues and operation.role in request.token.roles):
                check_role(request.token, operation.role, _queue_of(request))
            if request.token.is_anonymous:
                asgi.check_name(request, self.names)
        if operation.is_shown:
            request.asked = asgi.read_query_of(operation, request.query)
            if request.method not in WITH_BODY and asgi.has_body(scope):
                raise fields.invalid("body", f"a {request.method} takes none; say it in the URL")

    def _note_refused(
        self, scope: asgi.Scope, request: asgi.Request, problem: fields.Problem
    ) -> None:
        """Log who may not do what."""
        who = "" if request.token is None else _name_of(request.token)
        if not who:
            who = f"somebody at {(scope.get('client') or ['an unknown address'])[0]}"
        act = f"{request.method} {request.operation.shown_path}"
        self.audit.refused(who, act, _queue_of(request) or "", problem.detail)

    async def _answer(self, request: asgi.Request) -> asgi.Answer:
        operation = request.operation
        if request.method in WITH_BODY and not operation.reads:
            await request.read_body(MAX_BODY)
        if b"idempotency-key" in request.headers and operation.idempotent_by_key:
            made = await self._idempotency.run(request, partial(self._run, request))
            if operation.again is not None and REPLAYED in made.headers and made.status == 200:
                made = await operation.again(self, made, *request.segments)
            return made
        return await self._run(request)

    async def _run(self, request: asgi.Request) -> asgi.Answer:
        """Do it, and note what was done if that is for the audit log."""
        operation, act = request.operation, request.operation.act
        if operation.is_shown and not (operation.media and is_event(request)):
            request.asked = {**operation.defaults, **request.asked, **request.fields()}
        run: Callable[[], Awaitable[Answer]] = partial(
            operation.run, self, request, *request.segments
        )
        if not act:
            return await run()
        who, queue = _name_of(request.token), _queue_of(request) or ""
        async with self.audit.doing(who, act, queue, _said(request)) as doing:
            made = await run()
            doing.number = made.number
            return made


def api_for(
    url: str,
    *,
    tokens: Tokens | None = None,
    operations: Iterable[asgi.Operation] = (),
    on_close: Iterable[Callable[[], Awaitable[None]]] = (),
    check_message: Callable[[str, bytes], None] | None = None,
    names: Iterable[str] = (),
    keep_answers: float = KEEP_ANSWERS,
    beside: Iterable[Beside] = (),
    extras: PageExtras | None = None,
    mask: Mask | None = None,
    ssl: Any = None,
    **options: Any,
) -> HttpApi:
    """The application for a broker URL, to be served or mounted.

    tokens: who may do what; without any, only requests from this machine are answered
    operations: more than those of every center
    on_close: awaited when the application ends
    check_message: is told the id and the bytes of each message before it is put; it raises a
        Problem for one that may not be
    names: names of this server, by which who has no token may read, where that is allowed
    keep_answers: seconds for which answers are kept under an Idempotency-Key
    beside: what runs while the application does, such as :func:`kombu_toc.notify.beside`
    extras: what the page shows beside what every center has
    mask: what is hidden of messages: on the page, and from tokens that may not write
    ssl: as in Celery's ``broker_use_ssl``
    options: as in ``broker_transport_options``

    Raises ConfigurationError for a URL or an option that makes no sense.
    """
    recorded = center_for(url, ssl=ssl, **options)
    return HttpApi(
        AsyncTimeoutCenter.from_url(url, ssl=ssl, **options),
        on_close=on_close,
        tokens=tokens,
        operations=operations,
        check_message=check_message,
        names=names,
        keep_answers=keep_answers,
        beside=beside,
        extras=extras,
        mask=mask,
        recorded=recorded if recorded.recorder is not None else None,
    )


class _InThreads(AwaitedPart):
    """The methods of a center that block, awaited."""

    def __init__(self, center: TimeoutCenter) -> None:
        super().__init__(center, asyncio.to_thread)
        parts = center.queues, center.dead, center.failures
        self.queues, self.dead, self.failures = (AwaitedPart(p, asyncio.to_thread) for p in parts)


async def _has_gone(request: asgi.Request) -> bool:
    """Whether the client has gone away, as far as is known by now."""
    connection = asgi.current()
    if connection is not None and connection.lost.is_set():
        request.gone = True
    if not request.gone:
        leaving = asyncio.ensure_future(request.wait_until_gone())
        await asyncio.sleep(0)
        if not leaving.done():
            leaving.cancel()
    return request.gone


#: Kinds of problems that say that somebody may not do something.
_REFUSALS = ("unauthorized", "forbidden")


def _name_of(token: Token) -> str:
    """Who asks, for the audit log; empty if nobody knows."""
    return "this machine" if token is NOBODY else token.name


def _queue_of(request: asgi.Request) -> str | None:
    """The queue that a request is about; None: it is about none, or about all."""
    return request.segments[0] if "{queue}" in request.operation.path else None


def _said(request: asgi.Request) -> str:
    """What a request says beside its queue, for the audit log. Of a schedule, which has arguments,
    only the name."""
    if _queue_of(request) is None:
        return " ".join(request.segments)
    asked = [f"{name}={said}" for name, said in request.query.items()]
    body = " ".join(request.body[: 4 * MOST].decode("utf-8", "replace").split())
    return " ".join(filter(None, [*request.segments[1:], *asked, body]))


# -- what is of no queue

OPERATIONS = asgi.Operations(
    "app",
    (
        *tasks.OPERATIONS,
        *pull.OPERATIONS,
        *queues.OPERATIONS,
        *library.FAILED,
        *tasks.JOBS,
        *library.OPERATIONS,
        *queues.SCALE,
    ),
)

_STATUS = fields.record("status", status=fields.TEXT)


@OPERATIONS.add(
    "GET /openapi.json", "This document", role="", returns=("OpenAPI 3.1.", {"type": "object"})
)
async def _openapi(api: HttpApi, request: asgi.Request) -> asgi.Answer:
    return asgi.answer(
        {**api.document, **({"servers": [{"url": quote(request.root)}]} if request.root else {})}
    )


@OPERATIONS.add("GET /healthz", role="", returns=("It does.", _STATUS))
async def _healthz(api: HttpApi, request: asgi.Request) -> asgi.Answer:
    """Tell whether the process lives."""
    return asgi.answer({"status": "ok"})


@OPERATIONS.add("GET /readyz", role="", returns=("It can.", _STATUS))
async def _readyz(api: HttpApi, request: asgi.Request) -> asgi.Answer:
    """Tell whether the broker can be used."""
    try:
        try:
            await asyncio.wait_for(api.center.call(_write_nothing), READY_WITHIN)
        except (asyncio.TimeoutError, *BROKEN):
            if not api.center.center.clustered:
                raise
            await asyncio.wait_for(api.center.call(_others_serve), READY_WITHIN)
    except asyncio.TimeoutError:
        detail = "the broker does not answer"
    except Exception as exc:
        said = exc.__cause__ or exc
        if is_demoted(said):
            detail = "the broker is a replica now, and takes nothing"
        elif is_temporary(said):
            detail = "the broker answers, and takes nothing for now"
        else:
            detail = fields.problem_of(exc).detail
    else:
        return asgi.answer({"status": "ready"})
    raise fields.Problem("broker", detail)


def _write_nothing(center: TimeoutCenter) -> None:
    """Ask for a change that changes nothing: a server that only reads refuses it."""
    center.client.zrem(center.keys.consumers, "")


def _others_serve(center: TimeoutCenter) -> None:
    """Raise an error unless the nodes of a Cluster that have no keys of ``{toc}`` serve: the queues
    that lie there can be used."""
    client: Any = center.client
    for place in set(client.places()) - {client.place_of(None)}:
        if b"cluster_state:ok" not in client.client_at(place).execute_command("CLUSTER", "INFO"):
            raise ServerError("a node cannot be reached")


@OPERATIONS.add(
    "GET /metrics",
    query={
        "topic": fields.Text("Only these queues: names, or patterns as mail,sms-*", most=16_000)
    },
    returns=("As celery toc metrics prints them.", fields.TEXT),
    problems=("not-found",),
    text="text/plain",
)
async def _metrics(api: HttpApi, request: asgi.Request) -> asgi.Answer:
    """Metrics in Prometheus's text format.

    Of more than 1,000 queues, those that most was put into.
    """
    try:
        from ..exporter import metrics_text
    except ImportError:
        raise fields.not_found(
            "metrics need prometheus-client: pip install 'celery-toc[metrics]'"
        ) from None
    topics = [one for one in request.asked.get("topic", "").split(",") if one]
    text = await api.center.call(metrics_text, topics)
    return asgi.Answer(text.encode(), content_type=b"text/plain; version=0.0.4; charset=utf-8")


# -- ``Idempotency-Key``: a POST that is repeated gets the answer that it got before
#
# An entry in Redis is first a claim, which says that somebody is at it, and then the answer. A
# claim of a process that died ends by itself.


#: Characters of a key, at most.
MAX_KEY = 255

#: Seconds for which a claim lasts: longer than any request. Who has claimed a key reads and writes
#: it only so long after asking for it: a little less, since a call takes a moment.
CLAIM = 120
HELD = CLAIM - 20.0

#: Statuses of answers that are not kept: the same request may get another one.
_PASSING = (401, 403, 408, 413, 429)

#: Claims that are remembered because Redis was away, at most.
MOST_LEFT = 10_000

REPLAYED = (b"idempotency-replayed", b"true")


class _Claim(NamedTuple):
    """What this process is at.

    name: of its key in Redis
    asked: tells the request from others
    until: until when nobody else can have claimed it, by the monotonic clock
    owner: tells this claim from others
    """

    name: str
    asked: str
    until: float
    owner: str

    @property
    def holds(self) -> bool:
        return time.monotonic() < self.until


class Idempotency:
    """Keeps answers.

    seconds: for how long, at most
    """

    def __init__(self, center: AsyncTimeoutCenter, seconds: float) -> None:
        self._center, self._redis = center, AwaitedPart(center.center.client)
        self._seconds = seconds
        #: claims that may be in Redis although nobody is at it, because it was away: name -> owner
        self._left: dict[str, str] = {}

    async def run(self, request: Request, run: Callable[[], Awaitable[Answer]]) -> Answer:
        """Do what is asked for, unless it was done under this key: then what was answered.

        Raises Problem if the key was used for something else, or if that is being done just now.
        """
        key = request.header(b"idempotency-key")
        if not 0 < len(key) <= MAX_KEY or not key.isascii() or not key.isprintable():
            raise fields.invalid(
                "idempotency-key", f"it must have 1 to {MAX_KEY} characters of printable ASCII"
            )
        whose = f"{request.token.name}\n{key}".encode("utf-8", "surrogateescape")
        claim = _Claim(
            self._center.center.keys.answer(hashlib.sha256(whose).hexdigest()),
            _fingerprint(request),
            time.monotonic() + HELD,
            secrets.token_hex(8),
        )
        if (found := await self._take(claim)) is not None:
            return _again(found, claim.asked)
        try:
            made = await run()
        except fields.Problem as problem:
            await self._keep(claim, as_answer(problem))
            raise
        except BaseException:
            await self._drop(claim)
            raise
        await self._keep(claim, made)
        if made.undo is not None:
            made = made._replace(undo=partial(self._forget, claim, made.undo))
        return made

    async def _take(self, claim: _Claim) -> dict[str, Any] | None:
        """Claim a key; what is there instead. Raises Problem if there is nothing to be had."""
        text = json.dumps({"asked": claim.asked, "owner": claim.owner})
        try:
            for _ in range(2):
                if await self._redis.set(claim.name, text, nx=True, ex=CLAIM):
                    return None
                found = await self._redis.get(claim.name)
                if found is None:
                    continue  # what was there has ended this very moment
                entry: dict[str, Any] = json.loads(found)
                if entry.get("owner") == claim.owner:
                    return None  # the reply was lost, and the call repeated
                if not self._is_left(claim, entry):
                    if "body" not in entry and await self._redis.pttl(claim.name) > CLAIM * 1000:
                        # The server's clock was set back. Whoever is at it may have died.
                        await self._redis.expire(claim.name, CLAIM)
                    return entry
                if await self._redis.set(claim.name, text, xx=True, ex=CLAIM):
                    return None
        except (RedisError, OSError):
            self._leave(claim)  # it may be there all the same
            raise
        raise _busy()

    def _leave(self, claim: _Claim) -> None:
        """Nobody is at it any more, and Redis cannot be told."""
        if len(self._left) >= MOST_LEFT:
            self._left.clear()
        self._left[claim.name] = claim.owner

    def _is_left(self, claim: _Claim, entry: dict[str, Any]) -> bool:
        """Whether this process has left what is there, a request for the same. One may go on."""
        if entry["asked"] != claim.asked or entry.get("owner") != self._left.get(claim.name, ""):
            return False
        del self._left[claim.name]
        return True

    async def _keep(self, claim: _Claim, made: Answer) -> None:
        """Keep an answer. If that fails, what was done is answered all the same."""
        if made.status >= 500 or made.status in _PASSING:
            await self._drop(claim)
            return
        if not claim.holds:
            return  # somebody else may be at it
        entry = {
            "asked": claim.asked,
            "status": made.status,
            "type": made.content_type.decode(),
            "headers": [[one.decode("latin-1") for one in pair] for pair in made.headers],
            "body": b64encode(made.body if made.kept is None else made.kept).decode(),
        }
        seconds = max(1, int(min(self._seconds, made.keep)))
        try:
            await self._redis.set(claim.name, json.dumps(entry), ex=seconds)
        except (RedisError, OSError) as exc:
            logger.warning("an answer is not kept under its Idempotency-Key: %s", exc)

    async def _forget(self, claim: _Claim, undo: Callable[[], Awaitable[Any]]) -> None:
        """Undo what nobody got the answer to. A repetition does it anew: what the answer says is
        true no more."""
        await self._drop(claim)
        await undo()

    async def _drop(self, claim: _Claim) -> None:
        try:
            if claim.holds:
                await self._redis.delete(claim.name)
        except (RedisError, OSError):
            self._leave(claim)


def as_answer(problem: fields.Problem) -> Answer:
    return Answer(problem.body(), problem.status, fields.CONTENT_TYPE, headers=problem.headers)


def _again(entry: dict[str, Any], asked: str) -> Answer:
    if entry["asked"] != asked:
        raise fields.Problem(
            "key-reused",
            "this Idempotency-Key was used for another request; use a new one for each request, "
            "and the same only to repeat it",
            "idempotency-key",
        )
    if "body" not in entry:
        raise _busy()
    headers = [(a.encode("latin-1"), b.encode("latin-1")) for a, b in entry["headers"]]
    return Answer(
        b64decode(entry["body"]),
        entry["status"],
        entry["type"].encode(),
        headers=(*headers, REPLAYED),
    )


def _busy() -> fields.Problem:
    return fields.Problem(
        "conflict",
        "a request with this Idempotency-Key is being dealt with; repeat it in a moment",
        "idempotency-key",
        fields.retry_after(1),
    )


def _fingerprint(request: Request) -> str:
    """Tells a request from another one."""
    digest = hashlib.sha256(request.body)
    events = sorted(
        (name.decode("latin-1"), said.decode("latin-1"))
        for name, said in request.headers.items()
        if name.startswith(b"ce-") or name == b"content-type"
    )
    query = sorted(request.query.items())
    digest.update(json.dumps([request.method, request.path, query, events]).encode())
    return digest.hexdigest()
