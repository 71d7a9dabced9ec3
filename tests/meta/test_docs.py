"""The pages are short, every link leads somewhere, every command can be given, and the table of
options is whole. What tutorials and how-tos show runs: Python and commands, block by block."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import click
import pytest
from celery import Celery
from celery.bin.base import CLIContext

import celery_toc
import kombu_toc
from celery_toc import aio
from celery_toc.cli import toc
from kombu_toc.client.options import Settings
from kombu_toc.http import new_token

from ..support import nursery
from ..support.cases import each
from ..support.library import close_libraries
from ..support.ports import free_port
from ..support.servers import Server

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


#: The pages that the site lists as tutorials and how-tos.
GUIDES = [
    name.replace("repository/", "") if "repository/" in name else f"docs/{name}"
    for part in re.findall(
        r"^  - (?:Tutorial|How to):\n((?:    .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.M
    )
    for name in re.findall(r": (\S+\.md)$", part, re.M)
]

#: Blocks (a page, and a text in them) that need more than a server, and the tests that run them.
ELSEWHERE = {
    ("docs/tutorial.md", ""): "e2e/test_tutorial.py",
    ("examples/django_orders/README.md", ""): "e2e/test_django_example.py",
    ("docs/cluster.md", "toc+cluster:"): "contract/test_cluster.py",
    ("docs/connections.md", "toc+rediss:"): "contract/test_tls.py",
    ("docs/connections.md", "toc+sentinel:"): "contract/test_sentinel.py",
    ("docs/django_tasks.md", ""): "e2e/test_django_tasks.py",
    ("docs/flower.md", "flower"): "e2e/test_flower.py",
    ("docs/http.md", '"delay": "soon"'): "contract/test_http.py",
    ("docs/library.md", "jango"): "e2e/test_django_example.py",
    ("docs/library.md", "engine.begin()"): "engines/test_library_commands.py",
    ("docs/library.md", "AsyncSession"): "engines/test_library_outbox_async.py",
    ("docs/monitoring.md", "import serve"): "meta/test_readme.py",
    ("docs/monitoring.md", "sentry_sdk"): "e2e/test_sentry.py",
    ("docs/notifier.md", "class Hook"): "meta/test_notifier_page.py",
    ("docs/opentelemetry.md", ""): "e2e/test_opentelemetry.py",
    ("docs/page.md", "urlpatterns"): "contract/test_page_django.py",
    ("docs/recurring.md", "import django"): "contract/test_beat_imports.py",
    ("docs/security.md", "ACL SETUSER"): "e2e/test_acl.py",
}

#: What a line has that cannot run: what it installs is there.
INSTALLS = ("pip install",)

#: What a block begins with that is for a shell, as a whole; and what one that has no kind begins
#: with, if its lines are commands and not something to look at.
SHELL = ("curl ", "receipt=")
COMMAND = re.compile("celery |python |pip ")

#: What a person answers, or waits for.
ANSWERED = {
    r"toc (migrate|failures retry|find .*--retry)(?!.*--dry-run)": "--yes",
    r"toc reshard": "--yes --settle 0",
    r"(toc web|kombu_toc\.http --broker)": "--port 0",
}

#: The app that the pages talk of, unless they show it.
SHOP = """
from celery import Celery

app = Celery("shop", broker="toc+redis://localhost:6379/0", backend="redis://localhost:6379/0")


@app.task(name="shop.mail.remind")
def remind(*args, **kwargs): ...
"""

#: A task of that app, which waits and has failed before.
ID = "3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11"


def prepare(
    local: Callable[[str], str], server: Server, center: kombu_toc.TimeoutCenter, folder: Path
) -> dict[str, Any]:
    """What the text of the pages takes as given: an app and its tasks, one of which
    waits and has failed before, an old broker, and a file with a token."""
    (folder / "shop.py").write_text(local(SHOP))
    names: dict[str, Any] = {}
    exec(local(SHOP), names)
    names |= dict.fromkeys(("expire", "index", "invoice"), names["remind"])
    for url in (server.url, server.toc_url):
        with Celery("sender", broker=url, set_as_current=False) as sender:
            sender.send_task("shop.mail.remind", (1,), task_id=ID, countdown=3600)
    center.queues.declare("mail")
    [waiting] = center.get(ID)
    failed = kombu_toc.FailedTask(ID, "celery", "shop.mail.remind", "TimeoutError")
    failed = failed._replace(kept_id=ID, message=waiting.body)
    assert center.failures.keep([failed], kombu_toc.FailureBounds()) == [True]
    (folder / "tokens.txt").write_text(new_token("ben", "read", "*")[1] + "\n")
    names |= {"center": center, "aio": aio, "celery_toc": celery_toc, "kombu_toc": kombu_toc}
    names |= {one: f"sqlite:///{folder}/{one}.db" for one in ("FIRST", "SECOND", "THIRD", "FOURTH")}
    return names


@pytest.mark.one_server("the pages name one server")
@pytest.mark.parametrize("page", [page for page in GUIDES if (page, "") not in ELSEWHERE])
def test_every_block_of_tutorials_and_how_tos_runs(
    page: str,
    server: Server,
    center: kombu_toc.TimeoutCenter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other, with what the text around them takes as given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".curlrc").write_text("fail\n")
    monkeypatch.setenv("CURL_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    here = {
        "toc+embedded://\n": f"{server.toc_url}\n",
        "toc+redis://localhost:6379/0": server.toc_url,
        "redis://localhost:6379/": server.url.removesuffix("0"),
        "redis://host/5": f"redis://127.0.0.1:{server.port}/5",
        'toc+redis://localhost"': f'{server.toc_url}"',
        ":9808": f":{free_port()}",
        "127.0.0.1:8000": f"127.0.0.1:{free_port()}",
        "/tmp/": f"{tmp_path}/",
    }

    def local(text: str) -> str:
        for there, place in here.items():
            text = text.replace(there, place)
        return text

    with ExitStack() as running:

        def run(line: str) -> None:
            for what, more in ANSWERED.items():
                line += f" {more}" if re.search(what, line) else ""
            program, *words = shlex.split(line)
            words = ["-m", "celery", *words] if program == "celery" else words
            if re.search(r"toc (web|notify)|--serve|--broker", line):
                begun = "Sending what is due" if "notify --" in line else " at http"
                served = running.enter_context(nursery.Program(words, {}, begun))
                here.setdefault("localhost:8088", served.said[-1].rpartition("//")[2])
                monkeypatch.setenv("API", f"http://{here['localhost:8088']}")
                return
            python = ["bash", "-c", line] if ">" in line else [sys.executable, *words]
            done = nursery.run(python, capture_output=True, text=True, timeout=90)
            assert done.returncode == 0, (line, done.stdout, done.stderr)

        names = prepare(local, server, center, tmp_path)
        running.callback(close_libraries)

        skipped = (*INSTALLS, *(part for of, part in ELSEWHERE if of == page))
        for kind, text in blocks_of(page):
            text = local(text)
            lines = [text] if kind == "python" or text.startswith(SHELL) else text.splitlines()
            lines = [line for line in lines if not any(part in line for part in skipped)]
            if kind == "python" and lines:
                exec(compile(text, page, "exec"), names)
                if "app = Celery(" in text:
                    (tmp_path / "shop.py").write_text(text)
                if "broker_url = " in text:
                    with names["app"].connection_for_write() as connection:
                        connection.connect()
            elif text.startswith(SHELL) and lines:
                subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
            elif kind == "sh" or COMMAND.match(text):
                for line in lines:
                    run(line)


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Kind and text of each block of a page that may have Python or commands."""
    found = re.findall(
        r"^ *```(\w*)\n(.*?)^ *```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    return [(kind, dedent(text)) for kind, text in found if kind in ("python", "sh", "")]


def test_what_runs_elsewhere_is_there() -> None:
    """Each row is of a block, and the test knows the page."""
    assert {page for page, _ in ELSEWHERE} < set(GUIDES)
    for (page, part), test in ELSEWHERE.items():
        assert any(part in text for _, text in blocks_of(page)), (page, part)
        assert Path(page).name in (ROOT / "tests" / test).read_text(), (page, test)
