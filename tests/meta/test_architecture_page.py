"""docs/architecture.md names files, functions and keys that there are, and leaves out no room."""

from __future__ import annotations

import ast
import re
from inspect import signature
from pathlib import Path

from kombu_toc.model.topic import Keys, Slot

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(
        re.findall(r"`([\w/.*-]*\w\.(?:py|lua|md)|(?:kombu_toc|celery_toc|tests)/\w+)`", PAGE)
    )
    assert len(named) > 50
    named.remove("kombu_toc/scripts/operations/peek.lua")  # an example
    assert [name for name in sorted(named) if not is_there(name)] == []


def is_there(name: str) -> bool:
    scripts = ("kombu_toc/scripts/operations", "kombu_toc/scripts/lib")
    inside = ("", "kombu_toc", *scripts, "kombu_toc/center", "tests", "docs")
    anywhere = (ROOT / "tests").rglob(name) if "/" not in name else ()
    return any(any((ROOT / folder).glob(name)) for folder in inside) or any(anywhere)


def test_every_method_that_is_pointed_at_is_there() -> None:
    pairs = re.findall(r"`([A-Z]\w+)\.(\w+)` (?:in |\()`([\w/]+\.py)`", PAGE)
    assert len(pairs) >= 2
    for owner, name, path in pairs:
        classes = {
            node.name: {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.ClassDef)
        }
        assert name in classes.get(owner, ()), f"there is no {owner}.{name} in {path}"


def test_every_room_has_a_row() -> None:
    rows = set(re.findall(r"^\| `((?:kombu_toc|celery_toc)/\w+)` \|", PAGE, re.MULTILINE))
    files = [*ROOT.glob("kombu_toc/*/*.py"), *ROOT.glob("celery_toc/*/*.py")]
    assert rows == {str(file.parent.relative_to(ROOT)) for file in files}


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
