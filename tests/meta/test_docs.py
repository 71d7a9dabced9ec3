"""The pages are short, every link leads somewhere, every command can be given, and the table of
options is whole."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest
from celery import Celery
from celery.bin.base import CLIContext

from celery_toc.cli import toc
from kombu_toc.client.options import Settings

from ..support.cases import each

ROOT = Path(__file__).parents[2]

PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md")
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


def test_all_pages_together_are_read_in_an_afternoon() -> None:
    """A fact stands once, and other pages link to it."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= 45_000


#: Each `celery toc` on a page, and where it stands.
COMMANDS = {
    shlex.join(words): page
    for page in PAGES
    for words in re.findall(r"^ *celery -A shop toc (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    for words in [shlex.split(words, comments=True)]
}


@each("command", sorted(COMMANDS))
def test_every_command_of_the_pages_can_be_given(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tokens.txt", "secrets.txt"):
        Path(name).touch()
    app = Celery("shop", broker="toc+redis://localhost:1/0", set_as_current=False)
    context = click.Context(toc, obj=CLIContext(app=app, no_color=True, workdir=None))
    group: click.Command = toc
    words = shlex.split(command)
    while isinstance(group, click.Group):
        name, found, words = group.resolve_command(context, words)
        assert found is not None and name is not None, COMMANDS[command]
        group = found
    group.make_context(group.name, words, parent=context)


def test_every_option_has_a_row() -> None:
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("options.md", "connections.md"))
    inner = {"connection", "ignored"}  # what is read, and not what is set
    rows = set(re.findall(r"`(\w+)(?:=\w+)?`", pages))
    assert {field.name for field in fields(Settings)} - inner - rows == set()
