"""What the programs that need a broker and no app have in common."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

from ..errors import ConfigurationError, TocError
from ..version import __version__
from .urls import mask_password


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


class Program(argparse.ArgumentParser):
    """A command line with ``--broker`` and ``--version``.

    variable: the environment variable with the broker, whose URL may have a password
    """

    def __init__(self, prog: str, description: str, variable: str) -> None:
        super().__init__(prog=prog, description=description)
        self._variable = variable
        self.add_argument("--version", action="version", version=__version__)
        self.add_argument(
            "--broker",
            metavar="URL",
            default=os.environ.get(variable),
            help=f"as toc+redis://localhost:6379/0; or the environment variable {variable}, which "
            "no list of processes shows",
        )

    def add_repeated(self, name: str, metavar: str, help: str) -> None:
        """An option that may be repeated."""
        help = f"{help}; may be repeated"
        self.add_argument(name, action="append", default=[], metavar=metavar, help=help)

    def run(
        self, arguments: list[str] | None, function: Callable[[argparse.Namespace], None]
    ) -> int:
        """Call a function with what is asked for; returns the exit code. An error is told without
        the password that may be in the broker's URL."""
        asked = self.parse_args(arguments)
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
        try:
            function(asked)
        except (TocError, OSError) as exc:
            shown = str(exc)
            if asked.broker:
                shown = shown.replace(asked.broker, mask_password(asked.broker))
            print(f"{self.prog}: {shown}", file=sys.stderr)
            return 1
        return 0

    def broker_of(self, asked: argparse.Namespace) -> str:
        """The broker's URL. Ends the program if none is named."""
        if not asked.broker:
            self.error(
                f"name the broker: --broker toc+redis://localhost:6379/0, or {self._variable}"
            )
        return str(asked.broker)


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
