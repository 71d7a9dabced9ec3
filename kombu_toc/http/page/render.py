"""The templates of the page, and the answers that show them. Jinja2 escapes what is put into them;
what would turn text around is written as its number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from ...client.programs import check_installed
from ...version import __version__
from ..request import Answer, Request
from . import words
from .reading import TITLES, WHOLE, cut, last_line
from .sessions import Visitor, cookie_header, cookie_name, read_cookie

if TYPE_CHECKING:
    from jinja2 import Environment

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

    template: the one that shows it
    values: what the template is given
    nav: which part of the navigation it is
    every: milliseconds after which its live parts are looked at again; 0: never
    trouble: why what is shown is old; empty if it is not
    now_us: Redis's clock, for times that count down
    typed: whether there is something to type: without the script, loading it again would lose that
    """

    title: str
    template: str
    values: Mapping[str, Any]
    nav: str = "-"
    every: int = 0
    trouble: str = ""
    status: int = 200
    now_us: int = 0
    typed: bool = False


# -- templates

#: What makes text look like another text, and what no page can hold: half of a surrogate pair, and
#: NUL. Each is shown as its number.
_TURNS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_NUMBERS = {one: f"\\u{one:04x}" for one in (0, *map(ord, _TURNS), *range(0xD800, 0xE000))}


def visible(value: Any) -> Any:
    """What a template shows of a value: of None, nothing."""
    if value is None:
        return ""
    if isinstance(value, (int, float)):
        return value
    text = value if isinstance(value, str) else str(value)
    if text.isascii() and "\0" not in text:
        return text
    return text.translate(_NUMBERS)  # of what is HTML already, it stays that


@cache
def templates() -> Environment:
    """The templates, made when the first page is shown."""
    check_installed("the page", "http", "jinja2")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        auto_reload=False,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    for filter in (words.number, words.span, words.lateness, words.moment, words.iso):
        made.filters[filter.__name__] = filter
    made.filters.update(cut=cut, last_line=last_line)
    made.globals.update(
        {name: getattr(words, name) for name in ("away", "counted", "link")},
        encoded=encoded,
        file=lambda name: words.link(name, v=file_of(name)[1]),
        flight=words.FLIGHT,
        sparkline=sparkline,
        titles=TITLES,
        version=__version__,
        whole=WHOLE,
    )
    return made


def render(template: str, **values: Any) -> str:
    """A template as HTML, which another one may be given."""
    made = templates().get_template(f"{template}.html").render(values)
    from markupsafe import Markup

    return Markup(made)


def sparkline(values: Sequence[float | None], width: int, height: int) -> str:
    """The path of a line through values; where one is None, it has a gap."""
    most = max((value for value in values if value is not None), default=0) or 1.0
    step = width / max(len(values) - 1, 1)
    pieces: list[str] = []
    drawing = False
    for place, value in enumerate(values):
        if value is None:
            drawing = False
            continue
        x, y = place * step, height - 2 - (height - 4) * value / most
        alone = not drawing and (place + 1 == len(values) or values[place + 1] is None)
        pieces.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}{'h1' if alone else ''}")
        drawing = True
    return " ".join(pieces)


#: Behind the name of a field whose value is percent-encoded, as in RFC 8187.
_ENCODED = "*"


def encoded(name: str, value: Any) -> tuple[str, str]:
    """The name and the value of a field that comes back as it is. The page shows some characters
    as their numbers, and a browser sends each end of a line as CR LF: what has such is
    percent-encoded."""
    said = str(value)
    if "\n" in said or "\r" in said or visible(said) != said:
        return name + _ENCODED, quote(said, safe="", errors="surrogatepass")
    return name, said


def decoded(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Fields as :func:`encoded` was given them. Raises UnicodeDecodeError."""
    return [
        (name.removesuffix(_ENCODED), unquote(value, errors="surrogatepass"))
        if name.endswith(_ENCODED)
        else (name, value)
        for name, value in pairs
    ]


# -- answers


@cache
def file_of(name: str) -> tuple[bytes, str]:
    """A file beside the pages, and what tells its version from others."""
    content = Path(__file__).with_name(name).read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:12]


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
    shown = {"ask": ask, "view": view, "navigation": navigation, "notice": said}
    document = render(view.template, now_us=view.now_us, **shown, **view.values)
    return Answer(document.encode(), view.status, HTML, tuple(headers))


def redirect(ask: Ask, to: str, said: str = "", *cookies: tuple[bytes, bytes]) -> Answer:
    """To another view, which says what was done.

    to: as :func:`.words.link` makes it
    """
    headers = [*HEADERS, (b"location", to.encode("ascii", "ignore")), *cookies]
    if said:
        text = quote(said[:300])  # a cookie has 4 KB
        said_by = cookie_name(SAID, ask.request)
        headers.append(
            (b"set-cookie", f"{said_by}={text}; HttpOnly; SameSite=Strict; Max-Age=20".encode())
        )
    return Answer(b"", 303, HTML, tuple(headers))
