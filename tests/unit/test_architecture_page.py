"""docs/architecture.md names files, functions and keys that there are, and leaves out no part."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kombu_toc.model.keys import Keys, Slot

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()

#: Where a file of the page may be, if the page does not say.
ROOMS = ("", "kombu_toc/", "kombu_toc/scripts/", "tests/", "docs/")


def section(title: str) -> str:
    return re.split(r"^#+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(
        re.findall(r"`([\w/.*-]*\w\.(?:py|lua|md)|(?:kombu_toc|celery_toc|tests)/\w+)`", PAGE)
    )
    parts = {
        *section("Parts of the center").split("`"),
        *section("Parts of the consumer").split("`"),
    }
    beside = {"peek.lua", "kombu_toc/scripts/peek.lua", "celery_toc/cli/peek.py"}  # its example
    missing = [
        name
        for name in sorted(named - parts - beside)
        if not any(any(ROOT.glob(room + name)) for room in ROOMS)
        and not any((ROOT / "tests").rglob(name))
        and not any((ROOT / "kombu_toc" / "center").glob(name))
    ]
    assert missing == []


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


@pytest.mark.parametrize("room", ["center", "consumer"])
def test_every_part_of_a_room_is_described(room: str) -> None:
    """A row as: | `part.py` | what it does |"""
    described = set(re.findall(r"`(\w+\.py)`", section(f"Parts of the {room}")))
    there = {path.name for path in (ROOT / "kombu_toc" / room).glob("[a-z]*.py")}
    assert described == there


def test_every_key_is_listed() -> None:
    keys, slot = Keys("toc:"), Slot("toc:", "mail", 0, (0, 3))
    shared = {getattr(keys, name) for name in Keys.__slots__} - {"toc:"}
    own = {*slot.stores[:1], *(key for key in slot.all() if "store" not in key)}
    own |= {slot.copies("<id>"), slot.sent("<producer>"), slot.given("<consumer>")}
    assert len(shared) > 15
    assert [key for key in sorted(shared | own) if f"`{key}" not in PAGE] == []
