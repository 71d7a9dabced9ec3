"""How a command ends: an exit code, and if it failed one line. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import click
from click_didyoumean import DYMGroup

import kombu_toc

# Exit codes; docs/commands.md has them for users.
DONE = 0
FAILED = 1  #: the broker cannot be used, or the operation failed
USAGE = 2  #: the command line is wrong, or the app's broker is no timeout center
NOT_FOUND = 3  #: there is no message of that id, or no queue of that name
TOO_LATE = 4  #: the message is in a state in which this cannot be done to it
FAULTS = 5  #: `check` has found inconsistencies
PARTIAL = 6  #: nodes of a Cluster did not answer; what the others have is shown


class Failure(click.ClickException):
    """One line on standard error, and an exit code."""

    def __init__(self, message: object, exit_code: int = FAILED) -> None:
        super().__init__(" ".join(str(message).split()))
        self.exit_code = exit_code  # type: ignore[misc]  # Click reads it from the instance, too

    def show(self, file: Any = None) -> None:
        click.echo(f"Error: {self.format_message()}", file=file, err=True)


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
    if isinstance(error, kombu_toc.LibraryError):
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
    """A command.

    example: lines for its help
    """

    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example = example

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in self.example.strip().splitlines():
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
