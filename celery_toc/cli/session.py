"""The session of a command: the app, its timeout center, and the screen."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo
from functools import cached_property
from typing import Any, TypeVar, cast

import click
from celery import Celery

import celery_toc
import kombu_toc

from .exits import DONE, FAILED, NOT_FOUND, PARTIAL, USAGE, Command, Declined, Failure
from .screen import Screen

T = TypeVar("T")

_NO_LIBRARY = (
    "this app has no task library: set toc_library in its broker_transport_options, for workers, "
    "senders and commands alike, as in app.conf.broker_transport_options = "
    "{'toc_library': 'sqlite:////path/library.db'}"
)


class Session:
    """One run of a command."""

    def __init__(self, ctx: click.Context, as_json: bool = False) -> None:
        self.ctx = ctx
        self.app: Celery = ctx.obj.app
        self.as_json = as_json
        self.screen = Screen(no_color=ctx.obj.no_color)
        self.exit_code = DONE
        #: slots that did not answer, for their nodes of a Cluster are away
        self.missing: list[kombu_toc.Missing] = []
        #: the server's INFO, once `center` has connected; empty if the server does not tell
        self.server: dict[str, Any] = {}

    @cached_property
    def center(self) -> celery_toc.TaskCenter:
        """The center of the app's broker. Fails, in one line, if there is none."""
        center = self._center
        self.server = kombu_toc.check_server(center.client)
        return center

    @cached_property
    def _center(self) -> celery_toc.TaskCenter:
        """The same, before it has connected."""
        try:
            self.ctx.meta["celery_toc.broker"] = self.broker
            center = celery_toc.timeout_center(self.app)
        except kombu_toc.ConfigurationError as exc:
            if not self._is_default_app:
                raise Failure(exc, USAGE) from exc
            # A user who names a broker instead of an app need not be told about apps.
            said = str(exc).replace("the broker of app 'default' is", "the broker is")
            hint = "" if self._names_broker else "; name your app: celery -A APP toc ..."
            raise Failure(f"{said}{hint}", USAGE) from exc
        except (ImportError, KeyError, ValueError) as exc:
            # Raised by Kombu: a transport whose library is not installed, or that does not exist.
            what = exc.args[0] if exc.args else exc
            raise Failure(f"the broker {self.broker} cannot be used: {what}", USAGE) from exc
        return center

    @property
    def library(self) -> Any:
        """The task library of the app. It works without Redis. Fails, in one line, if there is
        none."""
        try:
            return self._center.library
        except kombu_toc.ConfigurationError as exc:
            raise Failure(_NO_LIBRARY, USAGE) from exc

    def history(self, id: str) -> list[kombu_toc.Record]:
        """The records that the task library has of an id; none without a library."""
        try:
            library = self.center.library
        except kombu_toc.ConfigurationError:
            return []
        return library.history(id)

    @property
    def _is_default_app(self) -> bool:
        """Whether it is the app that Celery makes when none is named."""
        return bool(self.app.main == "default")

    @property
    def _names_broker(self) -> bool:
        """Whether the command line has ``-b``."""
        return bool(self.ctx.find_root().params.get("broker"))

    @property
    def broker(self) -> str:
        """The broker's URL, its password masked."""
        url = self.app.conf.broker_write_url or self.app.conf.broker_url or ""
        url = url if isinstance(url, str) else next(iter(url), "")
        return kombu_toc.mask_password(url.split(";")[0])

    @property
    def zone(self) -> tzinfo:
        """The app's time zone: times without an offset are in it, and times are shown in it."""
        return cast(tzinfo, self.app.timezone)

    @cached_property
    def now(self) -> float:
        """Redis's clock when it was first asked: seconds since the epoch."""
        seconds, microseconds = self.center.client.time()
        return float(seconds + microseconds / 1_000_000)

    @property
    def zone_name(self) -> str:
        """The app's time zone with its present offset: ``Europe/Vienna (UTC+01:00)``."""
        offset = datetime.fromtimestamp(self.now, self.zone).strftime("%z")
        return f"{self.zone} (UTC{offset[:3]}:{offset[3:]})"

    def time(self, option: str, text: str | None, now: float | None = None) -> float | None:
        """The time that an option gives, in seconds since the epoch; None if it is not given.

        now: seconds since the epoch; by Redis's clock unless given
        """
        if text is None:
            return None
        try:
            return kombu_toc.read_time(text, self.now if now is None else now, self.zone)
        except ValueError as exc:
            raise Failure(f"--{option}: {exc}", USAGE) from None

    def ask(self, question: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The answer of the center; while nodes of a Cluster are away, that of the others: what is
        missing is said when the command ends, which then has exit code 6."""
        try:
            return question(*args, **kwargs)
        except kombu_toc.PartialError as exc:
            for one in exc.missing:
                same = [m for m in self.missing if (m.topic, m.server) == (one.topic, one.server)]
                for other in same:  # another question of the same command
                    self.missing.remove(other)
                slots = sorted({*one.slots}.union(*(other.slots for other in same)))
                self.missing.append(one._replace(slots=tuple(slots)))
            return cast(T, exc.results)

    def json(self, document: dict[str, Any]) -> None:
        """Show one JSON document, with what is missing in it, if anything is."""
        if self.missing:
            fields = ("queue", "slots", "server", "error")
            missing = [dict(zip(fields, slots, strict=True)) for slots in self.missing]
            document = {**document, "missing": missing}
        self.screen.json(document)

    def say_missing(self) -> None:
        """Say which slots did not answer."""
        for slots in self.missing:
            Failure(f"no answer from {slots}", PARTIAL).show()
            self.exit_code = PARTIAL

    def queues(self, named: Sequence[str]) -> list[str]:
        """The queues that were named, or all. Fails if one does not exist."""
        known = self.center.queues.names()
        for name in named:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; do you mean {near[0]!r}?" if near else ""
                raise Failure(f"there is no queue {name!r}{hint}", NOT_FOUND)
        return list(dict.fromkeys(named)) or known

    def queue(self, named: str | None) -> str | None:
        """The queue that was named, if one was. Fails if it does not exist."""
        return self.queues([named])[0] if named is not None else None

    def complain(self, message: str, exit_code: int) -> None:
        """Report what went wrong with one of several things; the command goes on."""
        Failure(message, exit_code).show()
        self.exit_code = max(self.exit_code, exit_code)

    def complain_of_none(
        self, id: str, asked: Sequence[str] = (), away: Sequence[str] = ()
    ) -> None:
        """Report that there is no message of an id, as far as the nodes have answered.

        asked, away: what else does not know the id, and what has not answered
        """
        said = f"there is no message {id!r}{' on the nodes that answer' if self.missing else ''}"
        said += f", and {', '.join(asked)} never saw it" if asked else ""
        said += f"; no answer from {', '.join(away)}" if away else ""
        self.complain(said, NOT_FOUND)

    def confirm(self, question: str, yes: bool) -> None:
        """Ask, unless `yes`; fail if the user declines, or if there is no terminal to ask on."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise Failure("cannot ask for confirmation without a terminal; pass --yes", USAGE)
        if not click.confirm(question, err=True):
            raise Declined("Cancelled; nothing was changed.", FAILED)


def command(example: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function, whose first argument becomes a :class:`Session`. It has
    ``--json`` beside the options of the function.

    example: lines for its help
    """

    def make(function: Callable[..., Any]) -> click.Command:
        @click.pass_context
        @functools.wraps(function)
        def run(ctx: click.Context, /, as_json: bool, **kwargs: Any) -> None:
            session = Session(ctx, as_json)
            function(session, **kwargs)
            session.say_missing()
            ctx.exit(session.exit_code)

        name = function.__name__.rstrip("_")
        made = click.command(name, cls=Command, example=example)(run)
        made.params.append(
            click.Option(
                ["--json", "as_json"], is_flag=True, help="One JSON document, for scripts."
            )
        )
        return made

    return make
