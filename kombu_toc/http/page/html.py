"""HTML whose text is escaped by construction: what was not made here is text, wherever it stands.

There are no templates: a template is text in which somebody can forget to escape, and an engine
would be one more package for the few tags that the page has.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any, Protocol
from urllib.parse import urlencode

#: Elements that have no end tag.
_VOID = frozenset(("br", "hr", "input", "link", "meta"))

#: Names of attributes that Python has words for.
_NAMES = {"class_": "class", "for_": "for"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


class Tag(Protocol):
    """Makes an element."""

    def __call__(self, *children: Any, **attributes: Any) -> Markup: ...


def markup(*children: Any) -> Markup:
    """Children one behind the other. One that is no :class:`Markup` is text; None is nothing; a
    list or another iterable is its members."""
    parts: list[str] = []
    _add(parts, children)
    return Markup("".join(parts))


def _add(parts: list[str], children: Iterable[Any]) -> None:
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif child is None or child is False:
            continue
        elif isinstance(child, str):
            parts.append(escape(shown(child)))
        elif isinstance(child, (int, float)):
            parts.append(str(child))
        else:
            _add(parts, child)


def shown(text: str) -> str:
    """Text that a page can hold: half of a surrogate pair, a NUL and what turns the direction of
    text are shown as what they are."""
    if text.isascii() and "\0" not in text:
        return text
    return "".join(_visible(one) for one in text)


def _visible(one: str) -> str:
    if "\ud800" <= one <= "\udfff" or one == "\0" or one in _TURNS:
        return f"\\u{ord(one):04x}"
    return one


#: What makes text look like another text: it is written as its number.
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. An attribute that is True has no value; one that is None or False is left out;
    the underscore of a name is a hyphen."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = _NAMES.get(key) or key.replace("_", "-")
        if value is True:
            parts.append(f" {label}")
        else:
            parts.append(f' {label}="{escape(shown(str(value)))}"')
    parts.append(">")
    if name not in _VOID:
        _add(parts, children)
        parts.append(f"</{name}>")
    return Markup("".join(parts))


class _Tags:
    """Makes elements by their names: ``h.p("text", class_="dim")``."""

    def __getattr__(self, name: str) -> Tag:
        def make(*children: Any, **attributes: Any) -> Markup:
            return tag(name, *children, **attributes)

        setattr(self, name, make)
        return make


h = _Tags()


def link(view: str, **query: Any) -> str:
    """The address of a view, relative to the page: so it is the same wherever the page is mounted.
    What is None or empty is left out."""
    said = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{view}?{urlencode(said, errors='surrogatepass')}" if said else view
