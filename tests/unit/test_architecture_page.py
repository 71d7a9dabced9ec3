"""docs/architecture.md names files, functions and keys that there are, and leaves out no part."""

from __future__ import annotations

import ast
import re
from inspect import signature
from pathlib import Path

import pytest

from kombu_toc.model.keys import Keys, Slot

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def section(title: str) -> str:
    return re.split(r"^#+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_file_that_the_page_names_is_there() -> None:
    text = re.sub(r"^### Parts of .*?(?=^##)", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    named = set(
        re.findall(r"`([\w/.*-]*\w\.(?:py|lua|md)|(?:kombu_toc|celery_toc|tests)/\w+)`", text)
    )
    example = {"kombu_toc/scripts/peek.lua", "celery_toc/cli/peek.py"}
    assert len(named) > 50
    assert [name for name in sorted(named - example) if not is_there(name)] == []


def is_there(name: str) -> bool:
    inside = ("", "kombu_toc", "kombu_toc/scripts", "kombu_toc/center", "tests", "docs")
    anywhere = (ROOT / "tests").rglob(name) if "/" not in name else ()
    return any(any((ROOT / folder).glob(name)) for folder in inside) or any(anywhere)


def test_every_function_that_is_pointed_at_is_there() -> None:
    pairs = re.findall(r"`([A-Z]\w+)\.(\w+)` in `([\w/]+\.py)`", PAGE)
    assert len(pairs) >= 8
    for owner, name, path in pairs:
        classes = {
            node.name: {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.ClassDef)
        }
        assert name in classes.get(owner, ()), f"there is no {owner}.{name} in {path}"


@pytest.mark.parametrize(
    "room",
    ["kombu_toc/center", "kombu_toc/consumer", "kombu_toc/transport", "celery_toc/worker"],
)
def test_every_part_of_a_room_is_described(room: str) -> None:
    """A row as: | `part.py` | what it does |"""
    described = set(re.findall(r"`(\w+\.py)`", section(f"Parts of the {room.partition('/')[2]}")))
    there = {path.name for path in (ROOT / room).glob("[a-z]*.py")}
    assert described == there


def test_every_key_is_listed() -> None:
    keys, slot = Keys("toc:"), Slot("toc:", "mail", 0, (0, 3))
    shared = {key for name, key in vars(keys).items() if name not in ("prefix", "_stem")}
    for name, method in vars(Keys).items():
        if not name.startswith("_"):
            made = method(keys, *["<n>"] * (len(signature(method).parameters) - 1))
            key = made if isinstance(made, str) else made[0]
            shared |= set(re.findall(r"^toc:\{toc\}:[\w-]+:", key))
    own = {*slot.stores[:1], *(key for key in slot.all() if "store" not in key)}
    own |= {slot.copies("<id>"), slot.sent("<producer>"), slot.given("<consumer>")}
    assert len(shared) > 15
    assert [key for key in sorted(shared | own) if f"`{key}" not in PAGE] == []
