"""What the programs that need a broker and no app have in common."""

from __future__ import annotations

import argparse
import os
import sys

from ..version import __version__
from .urls import mask_password


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

    def broker_of(self, asked: argparse.Namespace) -> str:
        """The broker's URL. Ends the program if none is named."""
        if not asked.broker:
            self.error(
                f"name the broker: --broker toc+redis://localhost:6379/0, or {self._variable}"
            )
        return str(asked.broker)

    def tell(self, exc: Exception, asked: argparse.Namespace) -> None:
        """Say what is wrong, without the password that may be in the broker's URL."""
        shown = str(exc)
        if broker := asked.broker:
            shown = shown.replace(broker, mask_password(broker))
        print(f"{self.prog}: {shown}", file=sys.stderr)


def say(text: str) -> None:
    """Tell whoever has started the program."""
    print(text, file=sys.stderr, flush=True)
