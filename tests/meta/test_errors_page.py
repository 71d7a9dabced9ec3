"""docs/errors.md has every class of error, and what a message or a logged line leaves for a person
to do; and nothing that is no longer said.

A message needs a row unless it says itself what to do. It does so if

- it names its remedy (`REMEDY`), or
- it is about something that is tried again, or may be (`AGAIN`), or
- it is an error about a value of the caller's, which it names, or
- it is a logged line that ends with the error that caused it, which has a message of its own, or
- it is logged with a traceback: a defect, which is to be reported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kombu_toc import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
CLASSES, MESSAGES, LINES = re.split(r"^## (?:Messages|Log lines)$", PAGE, flags=re.MULTILINE)

#: The first cell of a row; of a log line the level, and the line.
ROWS = re.findall(r"^\| `([^`]+)` \|", MESSAGES, re.MULTILINE)
LOGGED = re.findall(r"^\| (\w+) \| `([^`]+)` \|", LINES, re.MULTILINE)

#: Said by Kombu, where celery-toc is not installed: tests/unit/test_plugin.py.
OF_KOMBU = "No such transport: toc"

LEVELS = {"warning": "warning", "error": "error", "exception": "defect", "critical": "critical"}

ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.TocError)
}


#: A remedy: what must be, a command, or an imperative at the beginning of a clause.
REMEDY = re.compile(
    r"\bmust\b|\btakes?\b|\bneeds?\b|there are \0|'celery toc|pip install|ACL SETUSER|\?\w+="
    r"|(?:^|[:;,.(?] |\b(?:or|and|then|instead) )(?:add|begin|bury|choose|close|configure|correct"
    r"|declare|do not|give|install|keep|leave|let|make|move|name|pass|percent-encode|put|raise"
    r"|remove|rename|renew|repeat|route|run|see|send|set|shorten|stop|tell|try|update|upgrade|use"
    r"|write)\b",
    re.IGNORECASE,
)

#: It passes, or is done once more, by others or at all.
AGAIN = re.compile(
    r"\bfor now\b|\blater\b|\bagain\b|will retry|\bcome back\b|\bgoes on$|this one waits"
    r"|others do it|being moved|just now|a moment ago|any more$|by now$|others have its slots"
)


class Said(NamedTuple):
    """A text in the code."""

    where: str
    kind: str  #: a level, or a class of error
    text: str  #: with a NUL for each value

    @property
    def says_all(self) -> bool:
        """Whether whoever reads it knows what to do, without a page."""
        if REMEDY.search(self.text) or AGAIN.search(self.text):
            return True
        if self.kind in ERRORS:
            of_a_value = issubclass(getattr(errors, self.kind), (ValueError, LookupError))
            return of_a_value or self.text.endswith("nothing was sent")
        return self.kind == "defect" or self.text.endswith(": \0")

    def is_in(self, row: str) -> bool:
        """Whether a row of the page shows this text: its constant parts, in their order."""
        return pattern_of(self.text).fullmatch(row) is not None


@cache  # there are more than re remembers
def pattern_of(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("\0"))), re.DOTALL)


class Log(NamedTuple):
    """A call that logs."""

    where: str
    level: str
    text: ast.expr


@cache
def trees() -> list[tuple[str, ast.Module]]:
    return [
        (str(file.relative_to(ROOT)), ast.parse(file.read_text()))
        for package in ("kombu_toc", "celery_toc")
        for file in sorted((ROOT / package).rglob("*.py"))
    ]


def constant(node: ast.expr) -> str | None:
    """The text of an expression, with a NUL for each value in it; None if it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (constant(part) for part in node.values)
        return "".join("\0" if part is None else part for part in parts)
    return None


@cache
def constants() -> dict[str, str]:
    """Texts that modules give a name."""
    return {
        node.targets[0].id: text
        for _, tree in trees()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        for text in [constant(node.value)]
        if text is not None
    }


def called(node: ast.Call) -> str:
    """The name of what is called, without that of its owner."""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def logs(where: str, tree: ast.AST) -> Iterator[Log]:
    """Calls like ``logger.warning(text)``, and those of a helper that is given a level of
    :mod:`logging` and then a text."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        place = f"{where}:{node.lineno}"
        match node.func:
            case ast.Attribute(value=owner, attr=method) if method in LEVELS:
                if "logger" in ast.unparse(owner):
                    traced = any(keyword.arg == "exc_info" for keyword in node.keywords)
                    yield Log(place, "defect" if traced else LEVELS[method], node.args[0])
        for level, text in zip(node.args, node.args[1:], strict=False):
            match level:
                case ast.Attribute(value=ast.Name("logging"), attr=name):
                    if name.lower() in LEVELS:
                        yield Log(place, name.lower(), text)


def relays(where: str, tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Methods that log a text that they are given: (name, level, number of the argument)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args if argument.arg != "self"]
            for log in logs(where, node):
                if isinstance(log.text, ast.Name) and log.text.id in names:
                    yield node.name, log.level, names.index(log.text.id)


def logged() -> Iterator[Said]:
    for where, tree in trees():
        every = list(logs(where, tree))
        known = {name: (level, number) for name, level, number in relays(where, tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = called(node)
                if name in known:
                    level, number = known[name]
                    every.append(Log(f"{where}:{node.lineno}", level, node.args[number]))
        for place, level, node in every:
            text = constants().get(node.id) if isinstance(node, ast.Name) else constant(node)
            if text is not None:
                yield Said(place, level, re.sub(r"%[-#.\d]*[sdrfi]", "\0", text))
            else:
                assert known and isinstance(node, ast.Name), f"{place} logs no constant text"


def raised() -> Iterator[Said]:
    """Texts that are given to an error of :mod:`kombu_toc.errors`."""
    for where, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                name = called(node)
                text = constant(node.args[0])
                if name in ERRORS and text is not None and text.strip("\0: "):
                    yield Said(f"{where}:{node.lineno}", name, text)


def _rows_for(missing: list[Said], row: str) -> str:
    """What whoever has changed a text is to do."""
    rows = {row.format(kind=one.kind, text=one.text.replace("\0", "VALUE")) for one in missing}
    places = ", ".join(one.where for one in missing)
    return "\n".join(["docs/errors.md lacks, in a section that fits:", *sorted(rows), places])


def test_every_class_of_error_has_a_row() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", CLASSES, re.MULTILINE)) == ERRORS


def test_what_does_not_say_what_to_do_has_a_row_and_what_is_said_no_more_has_none() -> None:
    """A row as: | `the message, with a word in capitals for each value` | what to do |, or as:
    | warning | `the line, with a word in capitals for each value` | what to do |

    One test, for to read the code takes long, and each process of a run would do so.
    """
    of_errors, lines = list(raised()), list(logged())
    missing = [
        one for one in of_errors if not one.says_all and not any(one.is_in(row) for row in ROWS)
    ]
    assert not missing, _rows_for(missing, "| `{text}` | what to do |")
    missing = [
        one
        for one in lines
        if not one.says_all
        and not any(level == one.kind and one.is_in(row) for level, row in LOGGED)
    ]
    assert not missing, _rows_for(missing, "| {kind} | `{text}` | what it means, what to do |")
    said = [*of_errors, *lines]
    assert len(ROWS) >= 20 and len(LOGGED) >= 20
    rows = [*ROWS, *(row for _, row in LOGGED)]
    gone = [row for row in rows if not any(one.text != "\0" and one.is_in(row) for one in said)]
    assert gone == [OF_KOMBU]


def test_a_row_leaves_something_to_do() -> None:
    rows = re.findall(r"^\| .*`.* \| (.*?) \|$", MESSAGES + LINES, re.MULTILINE)
    assert len(rows) == len(ROWS) + len(LOGGED)
    assert [row for row in rows if len(row) < 10 or row.startswith("nothing")] == []
