"""The frame of every view, and the parts that several have."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from ...version import __version__
from ..request import Answer, Request
from . import html
from .html import Markup, h, link, markup, shown
from .reading import TITLES, Shown, cut
from .sessions import Visitor, cookie_header, cookie_name, read_cookie

HTML = b"text/html; charset=utf-8"

#: What a page may load: its own script and style sheet, and nothing from anywhere else.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

HEADERS = (
    (b"content-security-policy", POLICY),
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)

#: The cookie that says once what was done.
SAID = "toc_said"

#: Files beside the pages -> their types.
FILES = {
    "page.css": b"text/css; charset=utf-8",
    "page.js": b"text/javascript; charset=utf-8",
    "icon.svg": b"image/svg+xml",
}


class Ask(NamedTuple):
    """What is asked of a view.

    query: parameters of the URL
    fields: of a form that was sent
    """

    request: Request
    visitor: Visitor
    query: Mapping[str, str]
    fields: Mapping[str, list[str]]

    def field(self, name: str) -> str:
        """A field of the form; empty if it is not there."""
        return (self.fields.get(name) or [""])[0]

    @property
    def is_live(self) -> bool:
        """Whether a page that is shown looks again by itself."""
        return bool(self.request.header(b"x-toc-live"))


class View(NamedTuple):
    """What a view has made.

    nav: which part of the navigation it is
    every: milliseconds after which its live parts are looked at again; 0: never
    trouble: why what is shown is old; empty if it is not
    now_us: Redis's clock, for times that count down
    typed: whether there is something to type: without the script, loading it again would lose that
    """

    title: str
    content: Markup
    nav: str = "-"
    every: int = 0
    trouble: str = ""
    status: int = 200
    now_us: int = 0
    typed: bool = False


@cache
def file_of(name: str) -> tuple[bytes, str]:
    """A file beside the pages, and what tells its version from others."""
    content = Path(__file__).with_name(name).read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:12]


def _versioned(name: str) -> str:
    return link(name, v=file_of(name)[1])


def page_of(ask: Ask, view: View, navigation: Sequence[tuple[str, str]]) -> Answer:
    """The answer that shows a view.

    navigation: views and their titles
    """
    headers = list(HEADERS)
    said_by = cookie_name(SAID, ask.request)
    said = unquote(read_cookie(ask.request, said_by))
    if said:
        headers.append(
            (b"set-cookie", f"{said_by}=; HttpOnly; SameSite=Strict; Max-Age=0".encode())
        )
    if ask.visitor.cookie:
        headers.append(cookie_header(ask.visitor.cookie, ask.request))
    document = markup(
        Markup("<!doctype html>"),
        h.html(
            h.head(
                h.meta(charset="utf-8"),
                h.title(f"{view.title} - celery-toc"),
                h.meta(name="viewport", content="width=device-width, initial-scale=1"),
                h.meta(name="color-scheme", content="light dark"),
                h.link(rel="icon", href=_versioned("icon.svg")),
                h.link(rel="stylesheet", href=_versioned("page.css")),
                h.script(src=_versioned("page.js"), defer=True),
                h.noscript(h.meta(http_equiv="refresh", content="5"))
                if view.every and not view.typed
                else None,
            ),
            h.body(
                h.a("Skip to the content", href="#content", class_="skip"),
                _head(ask, view, navigation),
                h.main(
                    trouble_of(view.trouble),
                    h.p(said, class_="said", role="status") if said else None,
                    h.h1(view.title),
                    view.content,
                    id="content",
                    tabindex="-1",
                ),
                h.footer(
                    f"celery-toc {__version__}. ",
                    h.span("Keys: press ", h.kbd("?"), class_="keys"),
                ),
                data_every=view.every or None,
                data_now=view.now_us or None,
            ),
            lang="en",
        ),
    )
    return Answer(document.encode(), view.status, HTML, tuple(headers))


def _head(ask: Ask, view: View, navigation: Sequence[tuple[str, str]]) -> Markup:
    visitor = ask.visitor
    if visitor.is_in:
        who: Any = form(ask, "leave", h.button(f"Sign out {visitor.name}", class_="plain"))
    elif visitor.may_enter:
        who = h.a("Sign in", href="login")
    else:
        who = h.span(visitor.name, class_="dim") if visitor.name else None
    return h.header(
        h.a("celery-toc", href="./", class_="brand"),
        h.nav(
            h.a(title, href=name or "./", aria_current="page" if name == view.nav else None)
            for name, title in navigation
        ),
        h.div(who, class_="who"),
    )


def trouble_of(text: str) -> Markup:
    """The banner that says why what is shown is old."""
    return h.div(
        h.p(h.strong("No news. "), text[:1].upper(), text[1:], role="alert", class_="trouble")
        if text
        else None,
        id="trouble",
        data_live=True,
    )


def live(name: str, *children: Any, **attributes: Any) -> Markup:
    """A part that is looked at again and again."""
    return h.section(*children, id=name, data_live=True, **attributes)


def form(ask: Ask, view: str, *children: Any, **attributes: Any) -> Markup:
    """A form that does something; no other site can send it."""
    name, value = ask.visitor.field
    return h.form(
        h.input(type="hidden", name=name, value=value),
        *children,
        method="post",
        action=view,
        **attributes,
    )


def hidden(fields: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[Markup]:
    """Fields of a form that are not seen; what is None or empty is left out."""
    pairs = fields.items() if isinstance(fields, Mapping) else fields
    return [exact("hidden", name, value) for name, value in pairs if value not in (None, "")]


#: Behind the name of a field whose value is percent-encoded, as in RFC 8187.
_ENCODED = "*"


def exact(kind: str, name: str, value: Any, **attributes: Any) -> Markup:
    """A field of a form whose value comes back as it is. The page shows some characters as their
    numbers, and a browser sends each end of a line as CR LF: what has such is percent-encoded.

    kind: ``hidden`` or ``checkbox``
    """
    said = str(value)
    if "\n" in said or "\r" in said or shown(said) != said:
        name, said = name + _ENCODED, quote(said, safe="", errors="surrogatepass")
    return h.input(type=kind, name=name, value=said, **attributes)


def decoded(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Fields as :func:`exact` was given them. Raises UnicodeDecodeError."""
    return [
        (name.removesuffix(_ENCODED), unquote(value, errors="surrogatepass"))
        if name.endswith(_ENCODED)
        else (name, value)
        for name, value in pairs
    ]


def redirect(ask: Ask, to: str, said: str = "", *cookies: tuple[bytes, bytes]) -> Answer:
    """To another view, which says what was done.

    to: as :func:`.html.link` makes it
    """
    headers = [*HEADERS, (b"location", to.encode("ascii", "ignore")), *cookies]
    if said:
        text = quote(said[:300])  # a cookie has 4 KB
        said_by = cookie_name(SAID, ask.request)
        headers.append(
            (b"set-cookie", f"{said_by}={text}; HttpOnly; SameSite=Strict; Max-Age=20".encode())
        )
    return Answer(b"", 303, HTML, tuple(headers))


class Column(NamedTuple):
    """A column of a table.

    kind: a class: ``number``, ``id``, ``wide``
    """

    title: str
    kind: str = ""


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Any]],
    *,
    nothing: str,
    classes: Callable[[int], str | None] = lambda place: None,
) -> Markup:
    """A table; on a narrow screen each row is a card, whose cells have their titles.

    nothing: what is said if there is no row
    """
    drawn = [
        h.tr(
            (
                h.td(cell, class_=column.kind or None, data_label=column.title)
                for column, cell in zip(columns, row, strict=True)
            ),
            class_=classes(place),
        )
        for place, row in enumerate(rows)
    ]
    if not drawn:
        return h.p(nothing, class_="nothing")
    return h.div(
        h.table(
            h.thead(
                h.tr(
                    h.th(column.title, class_=column.kind or None, scope="col")
                    for column in columns
                )
            ),
            h.tbody(drawn),
        ),
        class_="scroll",
    )


def details(pairs: Iterable[tuple[str, Any]]) -> Markup:
    """Names and what they say; what is None is left out."""
    return h.dl(
        h.div(h.dt(name), h.dd(value)) for name, value in pairs if value is not None and value != ""
    )


def filters(*children: Any, view: str) -> Markup:
    """A form that narrows a list down; on a narrow screen it is folded."""
    return markup(
        h.input(type="checkbox", id="unfold", class_="unfold"),
        h.label("Filters", for_="unfold", class_="button unfold"),
        h.form(*children, method="get", action=view, class_="filters"),
    )


def opening(view: str) -> Markup:
    """A form that leads to a queue by its name, where not all can be listed."""
    return h.form(
        labelled("Queue", h.input(name="queue", required=True, placeholder="its name", size=30)),
        h.button("Open"),
        method="get",
        action=view,
        class_="row",
    )


def badge(state: str) -> Markup:
    return h.span(TITLES.get(state, state), class_=f"badge {state}")


def message_link(shown: Shown) -> Markup:
    found = shown.found
    return h.a(found.id, href=link("message", queue=found.topic, id=found.id), class_="open")


def time_of(shown: Shown, now_us: int) -> Markup | str:
    """When a message is due, when its lease ends, or when it died."""
    us = shown.found.time_us
    return html.when(us, now_us) if us else "now: it was rolled back"


def arguments_of(shown: Shown) -> str:
    return cut(shown.arguments)


def tabs(about: str, chosen: str, choices: Iterable[tuple[str, Any, str]]) -> Markup:
    """Links of which one is chosen: (name, what is shown, address)."""
    return h.div(
        (
            h.a(text, href=to, aria_current="true" if name == chosen else None)
            for name, text, to in choices
        ),
        class_="tabs",
        role="group",
        aria_label=about,
    )


def labelled(text: str, control: Markup, **attributes: Any) -> Markup:
    return h.label(h.span(text), control, **attributes)
