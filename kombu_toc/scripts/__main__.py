"""Writes the scripts for clients in other languages: ``python -m kombu_toc.scripts --help``. What
each is called with is read from the head of its file; ``.ci/site.py`` shows it on the site."""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..model.message import DICTIONARY
from ..version import __version__
from .call import has_limited_form, load, names, source


def main(arguments: list[str] | None = None) -> int:
    """Write the protocol as JSON, or each script into a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m kombu_toc.scripts",
        description="Write the Lua scripts of the timeout center as JSON, each with its SHA-1 and "
        "what its keys and arguments are: docs/protocol.md explains them.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="write NAME.lua for each script into this folder instead, and protocol.json without "
        "the texts",
    )
    folder: Path | None = parser.parse_args(arguments).folder
    data = {"version": __version__, "dictionary": DICTIONARY.decode("ascii"), **as_data()}
    if folder is None:
        print(json.dumps(data, indent=1))
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, script in cast("dict[str, dict[str, Any]]", data["scripts"]).items():
            (folder / f"{name}.lua").write_text(script.pop("text"), encoding="ascii")
        (folder / "protocol.json").write_text(json.dumps(data, indent=1) + "\n", encoding="ascii")
    except OSError as exc:
        print(f"cannot write into {folder}: {exc.strerror}", file=sys.stderr)
        return 1
    return 0


# -- what the scripts are called with, read from the heads of their files


#: The number of the protocol: of the keys, what is in them, and how the scripts are called. A
#: client of the same number works beside this release.
PROTOCOL = 1

#: What a part of a head begins with.
_PARTS = {"KEYS": "keys", "ARGV": "arguments", "Returns": "returns"}

#: Where an entry begins: at the line's start, or after a gap.
_ENTRY = re.compile(r"(?:^|(?<= {2}))(?=(?:KEYS|ARGV)\b)")


class Head(NamedTuple):
    """What a script's first comment says.

    keys, arguments: what is in KEYS and ARGV, in their order: ``KEYS[1] topics``, or what follows
        from there on
    """

    name: str
    about: str
    keys: list[str]
    arguments: list[str]
    returns: str
    notes: list[str]


@cache
def _lines(name: str) -> list[str]:
    """The first comment of a file, without its marks."""
    lines = []
    for line in source(name).splitlines():
        if not line.startswith("--") or line.startswith("--@"):
            break
        lines.append(line[2:].removeprefix(" ").rstrip())
    return lines


def head(name: str) -> Head:
    """What the script of that name is called with."""
    plain = name.removesuffix("_limited")
    if plain != name and has_limited_form(plain):
        said = head(plain)
        return said._replace(
            name=name,
            about=f"{said.about} Of a topic that is limited.",
            keys=[*said.keys[:-1], "then what limits need", said.keys[-1]],
            arguments=[*said.arguments, "then what limits need"],
            notes=[*said.notes, *head("limited").notes],
        )
    parts: dict[str, list[str]] = {"about": [], "keys": [], "arguments": [], "returns": []}
    notes: list[list[str]] = []
    part = "about"
    for line in _lines(name):
        word = re.match(r"\w*", line)
        begins = _PARTS.get(word[0]) if word else None
        if begins is not None:
            part = begins
        elif not line:
            part = "notes"
            notes.append([])
            continue
        if part == "notes":
            notes[-1].append(line)
        elif part in ("keys", "arguments"):
            for entry in _ENTRY.split(line):
                _add(parts[part], entry)
        else:
            parts[part].append(line)
    text = {part: " ".join(" ".join(lines).split()) for part, lines in parts.items()}
    returns = text["returns"].removeprefix("Returns ")
    paragraphs = [" ".join(" ".join(lines).split()) for lines in notes if lines]
    return Head(name, text["about"], parts["keys"], parts["arguments"], returns, paragraphs)


def _add(entries: list[str], line: str) -> None:
    """Add what a line says: a new entry, or the rest of the one before."""
    line = " ".join(line.split())
    if not line:
        return
    if re.match(r"(KEYS|ARGV|then)\b", line) or not entries:
        entries.append(line)
    else:
        entries[-1] += f" {line}"


def as_data() -> dict[str, object]:
    """The protocol: its number, and each script with its text, SHA-1, keys and arguments."""
    scripts = {}
    for name in names():
        script, said = load(name), head(name)
        scripts[name] = {
            "sha1": script.sha,
            "about": said.about,
            "keys": said.keys,
            "arguments": said.arguments,
            "returns": said.returns,
            "text": script.text,
        }
    return {"protocol": PROTOCOL, "scripts": scripts}


if __name__ == "__main__":
    sys.exit(main())
