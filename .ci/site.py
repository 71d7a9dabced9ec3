"""What mkdocs adds to the pages of docs/ while it builds the site (mkdocs.yml names this file):

- the pages beside docs/: the README as the first one, CONTRIBUTING, CHANGELOG and the examples;
- `api.md`: every public name, its signature and its docstring;
- `modules.md`: every module and the sentence that it begins with;
- `scripts.md`: what each Lua script is called with, from the heads of their files.

Links between all of these lead to the place that a page has on the site.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import sys
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import redis

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import celery_toc  # noqa: E402
import kombu_toc  # noqa: E402
from kombu_toc.scripts.__main__ import PROTOCOL, Head, head, names  # noqa: E402
from tests.public_names import signature  # noqa: E402

LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)((?:#[^)]*)?\))")

#: Of the repository, what is on the site although it is not in docs/.
BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "examples/**/*")


def on_files(files: Any, config: Any) -> Any:
    """Add what docs/ does not have."""
    from mkdocs.structure.files import File

    for pattern in BESIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and "/data/" not in name and "__pycache__" not in name:
                files.append(File.generated(config, place(name), abs_src_path=str(path)))
    made = (("api.md", api()), ("modules.md", modules()), ("scripts.md", scripts()))
    for name, text in made:
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Have the links of a page lead to where their targets are on the site."""
    uri = page.file.src_uri
    source = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
    return links(markdown, "README.md" if uri == "index.md" else source)


def place(name: str) -> str:
    """Where a file of the repository is on the site."""
    if name == "README.md":
        return "index.md"
    return name.removeprefix("docs/") if name.startswith("docs/") else f"repository/{name}"


def links(markdown: str, source: str) -> str:
    """The text of a file of the repository, with links as they are on the site."""
    folder, here = posixpath.dirname(source), posixpath.dirname(place(source))

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if "://" in match[2] or not (ROOT / target).exists():
            return match[0]
        return match[1] + posixpath.relpath(place(target), here or ".") + match[3]

    return LINK.sub(moved, markdown)


def api() -> str:
    """A page of the public names, from their docstrings."""
    lines = ["# API", "", "[Python](python.md) shows how these are used.", ""]
    for package in (kombu_toc, celery_toc):
        for name, value in sorted(public(package), key=itemgetter(0)):
            said = inspect.getdoc(value) or ""
            if not (callable(value) or isinstance(value, property)):
                continue  # it has the docstring of its type
            lines += [f"{'###' if '.' in name else '##'} `{package.__name__}.{name}`", ""]
            if signed := signature(value):
                signed = signed.replace("Ellipsis", "...").replace("(self, ", "(")
                lines += [f"```python\n{name.rpartition('.')[2]}{signed}\n```", ""]
            lines += [paragraph(text) + "\n" for text in said.split("\n\n")]
    return "\n".join(lines)


def public(home: Any) -> Iterator[tuple[str, Any]]:
    """Each public name of a package, with those of its classes and of the parts of a center."""
    for name in home.__all__:
        value = getattr(home, name)
        yield name, value
        members = vars(value) if isinstance(value, type) else ()
        yield from ((f"{name}.{one}", getattr(value, one)) for one in members if one[0] != "_")
    if home.__name__ == "kombu_toc":
        center = home.TimeoutCenter(redis.Redis(port=1))
        for part in center.PARTS:
            for name, method in inspect.getmembers(getattr(center, part), callable):
                if name[0] != "_":
                    yield f"TimeoutCenter.{part}.{name}", method


def paragraph(text: str) -> str:
    """One of a docstring as Markdown; of arguments, which are a line each, as a list."""
    text = re.sub(r":\w+:`[~.]*([^`]*)`|``([^`]*)``", r"`\1\2`", text)
    listed = re.match(r"\w+(, \w+)*: ", text)
    text = re.sub(r"\n(?=\w+(?:, \w+)*: )", "\n- ", f"\n{text}")[1:] if listed else text
    return "".join(
        part if number % 2 else re.sub(r"([\\*_{}\[\]<>#|~])", r"\\\1", part)
        for number, part in enumerate(re.split("(`[^`]*`)", text))
    )


def modules() -> str:
    """A page of all modules, room by room."""
    lines = ["# Modules", "", "Each module begins with a sentence that says what it does.", ""]
    for package in ("kombu_toc", "celery_toc"):
        room = None
        for path in sorted(ROOT.glob(f"{package}/**/*.py"), key=lambda path: (path.parent, path)):
            said = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
            if path.name != "__init__.py" and said and "migrations" not in path.parts:
                if path.parent != room:
                    room = path.parent
                    lines += ["", f"## `{room.relative_to(ROOT)}`", ""]
                lines.append(f"- `{path.name}`: {shown(' '.join(said.split()))}")
    return "\n".join(lines) + "\n"


def scripts() -> str:
    """A page of what each script is called with."""
    about = "[The protocol](protocol.md) explains how a client calls them."
    sections = [section(head(name)) for name in names()]
    return "\n".join(["# Scripts", "", f"Of protocol {PROTOCOL}. {about}", "", *sections])


def section(said: Head) -> str:
    lines = [f"## `{said.name}`", "", shown(said.about), ""]
    lines += [item(entry) for entry in (*said.keys, *said.arguments)]
    lines += ["", f"Returns {shown(said.returns or 'nothing')}", ""]
    for note in said.notes:
        lines += [shown(note), ""]
    return "\n".join(lines)


def item(entry: str) -> str:
    place = re.match(r"(?:KEYS|ARGV)(?:\[[^\]]*\])?", entry)
    if place is None:
        return f"- {shown(entry)}"
    return f"- `{place[0]}` {shown(entry[place.end() :].strip(', :'))}"


def shown(text: str) -> str:
    """A text as Markdown: nothing in it is a mark."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", text)
