"""The session of a command: the app, its timeout center, and the screen; and what commands share:
times as text, options, completion."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone, tzinfo
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar, cast

import click
from celery import Celery
from celery.app.utils import find_app
from click_didyoumean import DYMGroup

import celery_toc
import kombu_toc

from .screen import Column, Progress, Row, Screen

T = TypeVar("T")

# Exit codes; docs/commands.md has them for users.
DONE = 0
FAILED = 1  #: the broker cannot be used, or the operation failed
USAGE = 2  #: the command line is wrong, or the app's broker is no timeout center
NOT_FOUND = 3  #: there is no message of that id, or no queue of that name
TOO_LATE = 4  #: the message is in a state in which this cannot be done to it
FAULTS = 5  #: `check` has found inconsistencies
PARTIAL = 6  #: nodes of a Cluster did not answer; what the others have is shown

_NO_LIBRARY = (
    "this app has no task library: set toc_library in its broker_transport_options, for workers, "
    "senders and commands alike, as in app.conf.broker_transport_options = "
    "{'toc_library': 'sqlite:////path/library.db'}"
)


class Session:
    """One run of a command."""

    def __init__(self, ctx: click.Context, as_json: bool, yes: bool) -> None:
        self.ctx = ctx
        self.app: Celery = ctx.obj.app
        self.as_json = as_json
        #: whether nothing is asked
        self.yes = yes
        #: shows nothing with ``--json``, which is what :meth:`json` shows
        self.screen = Screen(no_color=ctx.obj.no_color, hidden=as_json)
        self.exit_code = DONE
        #: slots that did not answer, for their nodes of a Cluster are away
        self.missing: list[kombu_toc.Missing] = []
        #: the server's name and version, once `center` has connected; empty if it does not tell
        self.server = {"name": "", "version": ""}

    @cached_property
    def center(self) -> celery_toc.TaskCenter:
        """The center of the app's broker. Fails, in one line, if there is none."""
        center = self._center
        if info := kombu_toc.check_server(center.client):
            valkey = info.get("valkey_version")
            version = str(valkey or info.get("redis_version") or "")
            self.server = {"name": "Valkey" if valkey else "Redis", "version": version}
        return center

    @cached_property
    def _center(self) -> celery_toc.TaskCenter:
        """The center, before it has connected."""
        try:
            self.ctx.meta["celery_toc.broker"] = self.broker
            center = celery_toc.timeout_center(self.app)
        except kombu_toc.ConfigurationError as exc:
            if self.app.main != "default":  # as Celery names the app that it makes by itself
                raise Failure(exc, USAGE) from exc
            # A user who names a broker instead of an app need not be told about apps.
            said = str(exc).replace("the broker of app 'default' is", "the broker is")
            named = self.ctx.find_root().params.get("broker")
            hint = "" if named else "; name your app: celery -A APP toc ..."
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

    def history(self, id: str) -> list[kombu_toc.Record] | None:
        """The records that the task library has of an id. None without a library, and without an
        answer, which is said when the command ends."""
        try:
            return self.center.library.history(id)
        except kombu_toc.ConfigurationError:
            return None
        except kombu_toc.LibraryError as exc:
            self.missing.append(kombu_toc.Missing("", (), "the task library", str(exc)))
            return None

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
            for missing in exc.missing:
                where = (missing.topic, missing.server)
                same = [one for one in self.missing if (one.topic, one.server) == where]
                for before in same:  # another question of the same command
                    self.missing.remove(before)
                slots = sorted({*missing.slots}.union(*(before.slots for before in same)))
                self.missing.append(missing._replace(slots=tuple(slots)))
            return cast(T, exc.results)

    def tell(self, document: dict[str, Any], *lines: str, notes: Iterable[str] = ()) -> None:
        """Show what was done: one JSON document, or these lines, without those that are empty.

        notes: further lines, to which attention is drawn
        """
        self.json(document)
        for line in filter(None, lines):
            self.screen.say(line)
        for note in filter(None, notes):
            self.screen.say(note, "yellow")

    def show(
        self,
        document: dict[str, Any],
        columns: Sequence[Column],
        rows: Iterable[Row],
        otherwise: str = "",
    ) -> list[str]:
        """Show one JSON document, or a table; return the columns for which there was no room."""
        self.json(document)
        return self.screen.table(columns, rows, otherwise)

    def say_more(self, after: str | None) -> None:
        """Say how to go on behind a page."""
        if after is not None:
            self.screen.say(f"There are more: --after {after}", "dim")

    def progress(self, label: str, total: int = 0) -> Progress:
        """Show how far long work has come, unless the output is JSON."""
        return Progress(label, total, hidden=self.as_json)

    @contextlib.contextmanager
    def looking(
        self, where: Callable[[T], bool] | None, queue: str | None, state: str | None
    ) -> Iterator[Callable[[T], bool] | None]:
        """Show how far a look through messages has come: of a queue or all, in a state or all.

        where: a predicate. What is returned in its place counts what it is asked of
        """
        if where is None or self.as_json:
            yield where
            return
        total = sum(
            sum(one.counts) if state is None else getattr(one.counts, state.replace(" ", "_"))
            for one in self.ask(self.center.queues.summary, queue)
        )
        looked = itertools.count(1)
        with self.progress("Looking", total) as bar:

            def look(found: T) -> bool:
                if not (number := next(looked)) % 100:
                    bar(number)
                return where(found)

            yield look

    def json(self, document: dict[str, Any]) -> None:
        """With ``--json``, show one JSON document, with what is missing in it, if anything is."""
        if not self.as_json:
            return
        if self.missing:
            fields = ("queue", "slots", "server", "error")
            missing = [dict(zip(fields, slots, strict=True)) for slots in self.missing]
            document = {**document, "missing": missing}
        self.screen.json(document)

    def queues(self, named: Sequence[str]) -> list[str]:
        """The queues that were named, or all. Fails if one does not exist."""
        known = self.center.queues.names()
        for name in named:
            if name not in known:
                raise Failure(f"there is no queue {name!r}{meant(name, known)}", NOT_FOUND)
        return list(dict.fromkeys(named)) or known

    def queue(self, named: str | None) -> str | None:
        """The queue that was named, if one was. Fails if it does not exist."""
        return self.queues([named])[0] if named is not None else None

    def complain(self, message: str, exit_code: int = FAILED) -> None:
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

    def confirm(self, question: str) -> None:
        """Ask, unless with ``--yes``; fail if the user declines, or if there is no terminal to ask
        on."""
        if self.yes:
            return
        if not sys.stdin.isatty():
            raise Failure("cannot ask for confirmation without a terminal; pass --yes", USAGE)
        if not click.confirm(question, err=True):
            raise Declined("Cancelled; nothing was changed.")


def command(function: Callable[..., Any]) -> click.Command:
    """Make a command of a function, whose first argument becomes a :class:`Session`. It has
    ``--json`` beside the options of the function, whose docstring is its help and may end with
    ``Examples:``."""

    @click.pass_context
    @functools.wraps(function)
    def run(ctx: click.Context, /, as_json: bool, yes: bool = False, **kwargs: Any) -> None:
        session = Session(ctx, as_json, yes)
        function(session, **kwargs)
        for slots in session.missing:
            Failure(f"no answer from {slots}", PARTIAL).show()
            session.exit_code = PARTIAL
        ctx.exit(session.exit_code)

    made = click.command(function.__name__.rstrip("_"), cls=Command)(run)
    # Click appends it, behind the others.
    return cast(click.Command, flag("--json as_json", "One JSON document, for scripts.")(made))


# -- times for people and for JSON


def iso(seconds: float) -> str:
    """ISO 8601 in UTC, to the millisecond: the form of every time in JSON."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def iso_us(us: int) -> str | None:
    """ISO 8601 of microseconds since the epoch; None of 0, which is no time."""
    return iso(us / 1e6) if us else None


#: Attributes of results, and what JSON calls them.
_NAMES = {"topic": "queue", "action_us": "time", "modified_us": "changed"}


def document(result: Any, names: str) -> dict[str, Any]:
    """A result as in JSON: these of its attributes, with each moment in ISO 8601."""
    made: dict[str, Any] = {}
    for name in names.split():
        value = getattr(result, name)
        if name.endswith("_us"):
            value = iso_us(value or 0)
        elif isinstance(value, datetime):
            value = iso(value.timestamp())
        made[_NAMES.get(name, name.removesuffix("_us"))] = value
    return made


def local(seconds: float, zone: tzinfo) -> str:
    """``2030-12-24 18:00:00`` in a time zone, for people."""
    return datetime.fromtimestamp(seconds, zone).strftime("%Y-%m-%d %H:%M:%S")


def local_iso(seconds: float, zone: tzinfo) -> str:
    """ISO 8601 in a time zone, with its offset from UTC, to the second."""
    return datetime.fromtimestamp(seconds, zone).isoformat(timespec="seconds")


def span(seconds: float) -> str:
    """A span of time in at most two units: ``350ms``, ``12s``, ``2h05m``, ``3d04h``."""
    if seconds < 0.9995:
        return f"{round(seconds * 1000)}ms"
    whole = round(seconds)
    if whole < 10:
        return f"{seconds:.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def milliseconds(seconds: float) -> str:
    """A span; below ten milliseconds to the tenth of one: ``1.3ms``."""
    return f"{seconds * 1000:.1f}ms" if seconds < 0.00995 else span(seconds)


def distance(seconds: float) -> str:
    """A span from now: ``in 2h05m``, ``12s ago``."""
    return f"in {span(seconds)}" if seconds >= 0 else f"{span(-seconds)} ago"


# -- options and arguments that several commands share, and their completion

#: Ids that completion reads at most: it must answer while somebody holds the Tab key.
MAX_COMPLETED = 100


class Read(click.ParamType):  # type: ignore[type-arg]  # Click's is generic from 8.5 on
    """What a function reads of a text; its ValueError says what is wrong."""

    def __init__(self, name: str, read: Callable[[Any], Any]) -> None:
        self.name, self.read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.read(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


#: What an option takes, by the name that help has for it: seconds, or a number from 1 on.
_KINDS: dict[str, Any] = {"SPAN": Read("span", kombu_toc.read_span), "N": click.IntRange(1)}


# -- completion: it never raises, and never takes long


def _completing(ctx: click.Context) -> celery_toc.TaskCenter:
    """The center, before any command has run: only the words typed so far are known."""
    params = ctx.find_root().params
    app = params.get("app")
    if params.get("broker"):
        os.environ["CELERY_BROKER_URL"] = params["broker"]
    app = find_app(app) if isinstance(app, str) else app
    if app is None:
        from celery import current_app

        app = current_app._get_current_object()
    return celery_toc.timeout_center(app, socket_connect_timeout=0.3, socket_timeout=0.5)


def _completion(read: Callable[[celery_toc.TaskCenter, Any], Iterable[str]]) -> Any:
    """What completes a word with names that are read of a center, and of a queue if one was
    named."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        try:
            names = read(_completing(ctx), ctx.params.get("queue"))
            return [name for name in names if name.startswith(incomplete)]
        except Exception:  # a shell that completes a word has no place for an error
            return []

    return complete


def _due_next(
    center: celery_toc.TaskCenter, queue: str | None, state: str | None = None
) -> Iterable[str]:
    return (one.id for one in center.scan(queue, state=state, limit=MAX_COMPLETED).messages)


complete_queue = _completion(lambda center, queue: center.queues.names())
complete_id = _completion(_due_next)
complete_dead_id = _completion(functools.partial(_due_next, state="dead"))
complete_schedule = _completion(
    lambda center, queue: (one.name for one in center.schedules.list(limit=MAX_COMPLETED).schedules)
)


def option(names: str, metavar: str, help: str, **more: Any) -> Callable[[Any], Any]:
    """An option with a value: ``option("--queue -Q", "NAME", "Only in this queue.")``.

    metavar: SPAN and N say what it takes
    more: as click takes it; help tells the default
    """
    more = {"type": _KINDS.get(metavar), "show_default": bool(more.get("default")), **more}
    return click.option(*names.split(), metavar=metavar, help=help, **more)


def choice(names: str, words: Sequence[str], help: str, **more: Any) -> Callable[[Any], Any]:
    """An option that takes one of a few words."""
    return click.option(*names.split(), type=click.Choice(words), help=help, **more)


def flag(names: str, help: str, **more: Any) -> Callable[[Any], Any]:
    """An option without a value."""
    return click.option(*names.split(), is_flag=True, help=help, **more)


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator for several arguments and options, in the order in which help has them."""

    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return add


queue_option = option(
    "--queue -Q queue", "NAME", "Only in this queue.", shell_complete=complete_queue
)
task_option = option("--task", "NAME", "Only tasks of that name; * and ? match any.")
queues_argument = click.argument(
    "queues", nargs=-1, metavar="[QUEUE]...", shell_complete=complete_queue
)
yes_option = flag("--yes -y", "Do not ask.")


def ids_argument(complete: Any = None) -> Callable[[Any], Any]:
    return click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=complete)


def chosen(complete: Any, *more: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What selects dead messages, or failed tasks."""
    every = flag("--all -a every", "All of them.")
    return together(ids_argument(complete), queue_option, task_option, *more, every, yes_option)


def are_named(ids: Sequence[str], queue: str | None, **others: object) -> bool:
    """Whether ids are named. Fails unless there are either ids or filters."""
    *names, last = (f"--{name}" for name in others)
    words = f"{', '.join(names)} or {last}"
    narrowed = any(value not in (None, False) for value in others.values())
    if ids and narrowed:
        raise click.UsageError(f"give ids, or {words}, and not both")
    if not (ids or narrowed or queue):
        raise click.UsageError(f"say which: ids, --queue, {words}")
    return bool(ids)


# -- how a command ends: an exit code, and if it failed one line


class Failure(click.ClickException):
    """One line on standard error, and an exit code."""

    def __init__(self, message: object, exit_code: int = FAILED) -> None:
        super().__init__(" ".join(str(message).split()))
        self.exit_code = exit_code  # type: ignore[misc]  # Click reads it from the instance, too

    def show(self, file: Any = None) -> None:
        click.echo(f"Error: {self.format_message()}", file=file, err=True)


def meant(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of an error: the name that is most like one that there is not."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; do you mean {near[0]!r}?" if near else otherwise


class Declined(Failure):
    """The user declined, which is no error: the line is shown without ``Error:``."""

    def show(self, file: Any = None) -> None:
        click.echo(self.format_message(), file=file, err=True)


def _wrong_usage(error: click.UsageError) -> Failure:
    """The error in one line; Click would print three."""
    option = getattr(error, "option_name", None)
    if option in ("-A", "--app", "-b", "--broker"):
        return Failure(f"{option} goes before the command: celery {option} ... toc ...", USAGE)
    path = error.ctx.command_path if error.ctx else "celery toc"
    return Failure(f"{error.format_message().rstrip('.')}; see '{path} --help'", USAGE)


def _failure(error: Exception, ctx: click.Context) -> Failure | None:
    """The line for an error; None if it is a defect, whose traceback somebody needs."""
    import redis

    if isinstance(error, click.UsageError):
        return _wrong_usage(error)
    told = (kombu_toc.ConfigurationError, kombu_toc.ActionTimeError, kombu_toc.TraitError)
    if isinstance(error, told):
        return Failure(error, USAGE)
    if isinstance(
        error, (kombu_toc.LibraryError, kombu_toc.MigrationError, kombu_toc.ReshardError)
    ):
        return Failure(error)
    if isinstance(error, BrokenPipeError):  # nobody reads the output any more; Click ends quietly
        return None
    if isinstance(error, (redis.RedisError, kombu_toc.TocError, OSError)):
        url = ctx.meta.get("celery_toc.broker", "")
        return Failure(f"the broker {url} cannot be used: {error}")
    return None


class _Exits(click.Command):
    """Turns errors into a line and an exit code."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as exc:
            raise _wrong_usage(exc) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as exc:
            failure = _failure(exc, ctx)
            if failure is None:
                raise
            raise failure from exc


class Command(_Exits):
    """A command, whose help may end with ``Examples:``."""

    def __init__(self, *, help: str, **kwargs: Any) -> None:
        text, _, self.examples = inspect.cleandoc(help).partition("\nExamples:\n")
        super().__init__(help=text, **kwargs)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in self.examples.splitlines():
                formatter.write(f"  {line.strip()}\n")


class Group(_Exits, DYMGroup):  # type: ignore[misc]  # click_didyoumean has no types
    """A group whose commands are imported when they are used. Without a command it shows its help.

    commands_at: name of a command -> its module, in which it has that name, or ``name_``
    """

    def __init__(self, *args: Any, commands_at: Mapping[str, str], **kwargs: Any) -> None:
        shows_help = {"invoke_without_command": True, "callback": _show_help}
        super().__init__(*args, **{**shows_help, **kwargs})
        self.commands_at = commands_at

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands_at]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.commands_at:
            return None
        module = import_module(self.commands_at[name])
        return cast(click.Command, getattr(module, f"{name}_", None) or getattr(module, name))


@click.pass_context
def _show_help(ctx: click.Context, /, **_: Any) -> None:
    # Options that the app has added to all commands come as keywords; they mean nothing here.
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
