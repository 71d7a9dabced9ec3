"""The README is short, every link leads somewhere, and the table of options is whole."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from pathlib import Path

from kombu_toc.client.options import Settings

ROOT = Path(__file__).parents[2]

PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "examples/*/*.md")
    for path in ROOT.glob(pattern)
)

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@cache
def anchors(page: Path) -> set[str]:
    """What a link to this page may have behind its #, as GitHub makes it from the headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_the_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_every_link_of_a_page_leads_somewhere() -> None:
    broken = []
    for page in map(ROOT.joinpath, PAGES):
        for target in LINK.findall(page.read_text()):
            if re.match(r"[a-z]+://", target):
                continue
            path, _, anchor = target.partition("#")
            other = (page.parent / path).resolve() if path else page
            if not other.exists() or (anchor and anchor not in anchors(other)):
                broken.append((page.name, target))
    assert broken == []


def test_every_page_of_the_docs_can_be_reached_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert [name for name in PAGES if name.startswith("docs/") and name not in linked] == []


def test_every_option_has_a_row() -> None:
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("options.md", "connections.md"))
    inner = {"connection", "ignored"}  # what is read, and not what is set
    rows = set(re.findall(r"`(\w+)(?:=\w+)?`", pages))
    assert {field.name for field in fields(Settings)} - inner - rows == set()
