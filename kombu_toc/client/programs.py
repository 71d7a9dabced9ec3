"""What the programs that need a broker and no app have in common."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, TocError
from ..version import __version__
from .options import mask_password

if TYPE_CHECKING:
    import click

logger = logging.getLogger(__name__)


def check_installed(what: str, extra: str, *packages: str) -> None:
    """Raises ConfigurationError if one of these packages is not installed.

    what: what needs them
    extra: which of celery-toc's extras brings all of them
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        many = "packages" if len(missing) > 1 else "package"
        raise ConfigurationError(
            f"{what} needs the {many} {' and '.join(missing)}: pip install 'celery-toc[{extra}]'"
        )


def program(name: str, variable: str) -> Callable[[Callable[..., object]], click.Command]:
    """Make a command line of a function, with ``--broker`` and ``--version`` beside its options.

    name: how it is called
    variable: the environment variable with the broker, whose URL may have a password

    The function is called with the broker's URL (None if none is named) and its options. An error
    is told without the password that may be in that URL, with exit code 1.
    """
    import click

    def make(function: Callable[..., object]) -> click.Command:
        @functools.wraps(function)
        def run(broker: str | None, **options: Any) -> None:
            logging.basicConfig(
                level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
            )
            try:
                function(broker, **options)
            except (TocError, OSError) as exc:
                shown = str(exc)
                if broker:
                    shown = shown.replace(broker, mask_password(broker))
                say(f"{name}: {shown}")
                sys.exit(1)

        broker = click.option(
            "--broker",
            metavar="URL",
            envvar=variable,
            help=f"As toc+redis://localhost:6379/0; or the environment variable {variable}, which "
            "no list of processes shows.",
        )
        version = click.version_option(__version__, message="%(version)s")
        return click.command(name)(broker(version(run)))

    return make


def named(broker: str | None, variable: str) -> str:
    """The broker that a program was told. Ends the program with wrong usage if it was told none."""
    import click

    if not broker:
        raise click.UsageError(
            f"name the broker: --broker toc+redis://localhost:6379/0, or {variable}"
        )
    return broker


def say(text: str) -> None:
    """Tell whoever has started the program."""
    print(text, file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """Text in one line of a log: ids and names are made by others, and none shall look like an
    entry of its own."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


# -- how many files the process may have open

#: As many as a server for thousands needs.
WANTED = 65_536


def raise_file_limit() -> None:
    """Let as many connections be open as the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as exc:
            logger.debug("the limit of open files stays %d: %s", soft, exc)
