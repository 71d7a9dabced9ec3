"""What every command works with: the app, its timeout center, and the screen."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, tzinfo
from typing import Any

import click
from celery import Celery
from celery.app.utils import find_app
from kombu.utils.objects import cached_property

import celery_toc
import kombu_toc

from . import times
from .exits import DONE, FAILED, NOT_FOUND, USAGE, Declined, Failure
from .screen import Screen

#: Ids that completion looks through: it is to answer while somebody holds the Tab key.
COMPLETED = 100


class Session:
    """One run of a command."""

    def __init__(self, ctx: click.Context, as_json: bool = False) -> None:
        self.ctx = ctx
        self.app: Celery = ctx.obj.app
        self.as_json = as_json
        self.screen = Screen(no_color=ctx.obj.no_color)
        self.exit_code = DONE

    @cached_property
    def center(self) -> Any:
        """The center of the app's broker."""
        try:
            self.ctx.meta["celery_toc.broker"] = self.broker
            center = celery_toc.timeout_center(self.app)
        except kombu_toc.ConfigurationError as exc:
            if not self._is_nobodys:
                raise Failure(exc, USAGE) from exc
            # Whoever names a broker has no app, and knows it.
            said = str(exc).replace("the broker of app 'default' is", "the broker is")
            hint = "" if self._names_broker else "; name your app: celery -A APP toc ..."
            raise Failure(f"{said}{hint}", USAGE) from exc
        except (ImportError, KeyError, ValueError) as exc:
            # Kombu's own: a transport whose library is not there, or that does not exist.
            what = exc.args[0] if exc.args else exc
            raise Failure(f"the broker {self.broker} cannot be used: {what}", USAGE) from exc
        self.server = kombu_toc.check_server(center.client)
        return center

    #: what the server says of itself; empty where it does not tell
    server: dict[str, Any] = {}  # replaced, never changed

    @property
    def _is_nobodys(self) -> bool:
        """Whether it is the app that Celery makes when none is named."""
        return self.app.main == "default"

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
        """The app's time zone: what a time without an offset is in, and what people are shown."""
        return self.app.timezone

    @cached_property
    def now(self) -> float:
        """Redis's clock, when it was first asked."""
        seconds, microseconds = self.center.client.time()
        return seconds + microseconds / 1_000_000

    @property
    def zone_name(self) -> str:
        """The same for people: its name, and how far it is from UTC now."""
        offset = datetime.fromtimestamp(self.now, self.zone).strftime("%z")
        return f"{self.zone} (UTC{offset[:3]}:{offset[3:]})"

    def queues(self, asked: Sequence[str]) -> list[str]:
        """The queues that were asked for, or all. Fails if one does not exist."""
        known = self.center.topics()
        for name in asked:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; do you mean {near[0]!r}?" if near else ""
                raise Failure(f"there is no queue {name!r}{hint}", NOT_FOUND)
        return list(dict.fromkeys(asked)) or known

    def queue(self, asked: str | None) -> str | None:
        """The queue that was asked for, if one was. Fails if it does not exist."""
        return self.queues([asked])[0] if asked is not None else None

    def complain(self, message: str, exit_code: int) -> None:
        """Say what went wrong with one of several things, and go on with the next."""
        Failure(message, exit_code).show()
        self.exit_code = max(self.exit_code, exit_code)

    def confirm(self, question: str, yes: bool) -> None:
        """Go on if the user says so. Without a terminal to ask on, fail unless `yes`."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise Failure("cannot ask for confirmation without a terminal; pass --yes", USAGE)
        if not click.confirm(question, err=True):
            raise Declined("Cancelled; nothing was changed.", FAILED)


def with_session(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--json``, and a :class:`Session` as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON document, for scripts.")
    @click.pass_context
    @functools.wraps(function)
    def run(ctx: click.Context, as_json: bool, **kwargs: Any) -> None:
        session = Session(ctx, as_json)
        function(session, **kwargs)
        ctx.exit(session.exit_code)

    return run


class _Text(click.ParamType):
    """A text that one of the readers in `times` understands."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._read(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


#: A span of time, in seconds.
SPAN = _Text("span", times.read_span)


# -- completion: never an error, and never long


def _completing(ctx: click.Context) -> Any:
    """The center, when nothing has been run yet but the words that are there are known."""
    params = ctx.find_root().params
    app = params.get("app")
    if params.get("broker"):
        import os

        os.environ["CELERY_BROKER_URL"] = params["broker"]
    app = find_app(app) if isinstance(app, str) else app
    if app is None:
        from celery import current_app

        app = current_app._get_current_object()
    return celery_toc.timeout_center(app, socket_connect_timeout=0.3, socket_timeout=0.5)


def _silently(names: Callable[[click.Context, str], Iterable[str]]) -> Callable[..., list[str]]:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        try:
            return [name for name in names(ctx, incomplete) if name.startswith(incomplete)]
        except Exception:  # there is no place for an error between two keys
            return []

    return complete


@_silently
def complete_queue(ctx: click.Context, incomplete: str) -> Iterable[str]:
    return _completing(ctx).topics()


@_silently
def complete_id(ctx: click.Context, incomplete: str) -> Iterable[str]:
    """Of the messages that are due next."""
    page = _completing(ctx).scan(ctx.params.get("queue"), limit=COMPLETED)
    return [found.id for found in page.messages]


@_silently
def complete_dead_id(ctx: click.Context, incomplete: str) -> Iterable[str]:
    page = _completing(ctx).scan(ctx.params.get("queue"), state="dead", limit=COMPLETED)
    return [found.id for found in page.messages]


class Renamed(click.Option):
    """An option that still goes by older names, which its help does not show."""

    def __init__(self, *args: Any, formerly: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: what help and completion show
        self._shown = list(self.opts)
        self.opts = [*self.opts, *formerly]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        every, self.opts = self.opts, self._shown
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = every

    def get_error_hint(self, ctx: click.Context | None) -> str:
        return " / ".join(repr(name) for name in self._shown)


queue_option = click.option(
    "--queue",
    "-Q",
    "queue",
    cls=Renamed,
    formerly=("--topic", "-t"),
    metavar="NAME",
    shell_complete=complete_queue,
    help="Only in this queue.",
)
queues_argument = click.argument(
    "queues", nargs=-1, metavar="[QUEUE]...", shell_complete=complete_queue
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def counted(number: int, noun: str) -> str:
    """``1 message``, ``1,234 messages``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural(noun)}"


def plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def listed(names: Iterable[str]) -> str:
    """Names in a sentence: ``'a'``, ``'a' and 'b'``, ``'a', 'b' and 'c'``."""
    *some, last = [repr(name) for name in names]
    return f"{', '.join(some)} and {last}" if some else last
