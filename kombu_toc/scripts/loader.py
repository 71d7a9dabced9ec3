"""The Lua scripts, one file per operation, and their loader.

A script's first comment is its documentation. The line ``--@ clock wake`` names the fragments
that go before it. The line ``--< put`` stands for the text of that script, which runs there, with
the fragments that it needs. What follows ``--? put_logged`` in a line is run by the script of that
name only, which takes in the one that has the line: to run the whole in a function, and then to do
more, would cost it a third of what it does more.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Script(NamedTuple):
    """A script's text, and the SHA-1 that EVALSHA knows it by."""

    name: str
    text: str
    sha: str


def _read(name: str) -> str:
    return files(__package__).joinpath(f"{name}.lua").read_text(encoding="ascii")


def _named(text: str, mark: str) -> list[str]:
    """What the lines that begin with this mark name."""
    lines = (line for line in text.splitlines() if line.startswith(mark))
    return [name for line in lines for name in line[len(mark) :].split()]


@cache
def load(name: str) -> Script:
    """The script of that name, its fragments included, without comments."""
    own = _read(name)
    fragments = _named(own, "--@")
    while within := _named(own, "--<"):
        text = _read(within[0])
        own = own.replace(f"--< {within[0]}\n", text)
        fragments = [*_named(text, "--@"), *fragments]
    parts = [*map(_read, dict.fromkeys(fragments)), own.replace(f"--? {name} ", "")]
    lines = (line.split("--")[0].rstrip() for part in parts for line in part.splitlines())
    text = "\n".join(line for line in lines if line)
    return Script(name, text, hashlib.sha1(text.encode()).hexdigest())


def commands_of(scripts: Iterable[str]) -> set[str]:
    """The commands that these scripts run, in lower case."""
    found: set[str] = set()
    for name in scripts:
        found.update(re.findall(r"redis\.p?call\(\s*'(\w+)'", load(name).text))
    return {name.lower() for name in found}


def name_of(sha: str) -> str | None:
    """The name of the script with this SHA-1; None if there is none."""
    for file in files(__package__).iterdir():
        name = file.name.removesuffix(".lua")
        if file.name.endswith(".lua") and load(name).sha == sha:
            return name
    return None
