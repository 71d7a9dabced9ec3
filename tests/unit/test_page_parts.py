"""The parts of the page that decide: HTML, times, charts, forms."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_toc import Page
from kombu_toc.http import Mask, PageExtras, Problem, tasks
from kombu_toc.http.page import _fields_of
from kombu_toc.http.page import snapshots as groups_module
from kombu_toc.http.page.jobs import ACTS, Job, Selection
from kombu_toc.http.page.presentation import Reader, last_line, link, read_time, span, templates
from kombu_toc.http.page.queue import _back
from kombu_toc.http.page.snapshots import SPANS, DeadLetterGroups, edges_of
from kombu_toc.http.request import Request
from kombu_toc.http.tokens import Audit, read_cookie

from ..support.cases import each
from ..support.page_messages import NOW, envelope, found, read


def drawn(template: str, text: str) -> str:
    made: str = templates().from_string(template).render(text=text)
    return made


@given(st.text())
def test_text_is_escaped_wherever_it_stands(text: str) -> None:
    made = drawn(
        '<p title="{{ text }}" data-x="{{ text }}">{{ text }}{{ [text] | join }}</p>', text
    )
    assert made.count("<") == 2 and made.count(">") == 2
    assert made.count('"') == 4
    made.encode()  # whatever it is, a page can hold it


def test_what_turns_text_around_is_shown_as_what_it_is() -> None:
    for template in ("{{ text }}", "{{ text | lower }}", "{{ text ~ '' }}", "{{ [text] | join }}"):
        assert drawn(template, "a\u202egpj.exe\0\ud800") == r"a\u202egpj.exe\u0000\ud800"


def test_a_template_escapes_all_that_it_is_given_and_proves_each_form_that_it_posts() -> None:
    names = templates().list_templates()
    assert len(names) > 15
    for name in names:
        source, _, _ = templates().loader.get_source(templates(), name)  # type: ignore[union-attr]
        assert not re.search(r"=\s*{[{%]|\bsafe\b|\bautoescape\b", re.sub("{#.*?#}", "", source)), (
            name
        )
        for form in re.findall(r'<form method="post".*?</form>', source, re.DOTALL):
            assert "{{ proof() }}" in form, (name, form)


def test_an_address_holds_any_name() -> None:
    assert link("queue", queue="a/b?c&d#é ..", after=None, state="") == (
        "queue?queue=a%2Fb%3Fc%26d%23%C3%A9+.."
    )
    assert link("./") == "./"


@each(
    "text, seconds",
    [
        ("", None),
        ("now", NOW),
        ("1h30m", NOW + 5400),
        ("1 h 30 min", NOW + 5400),
        ("in 10 minutes", NOW + 600),
        ("-5m", NOW - 300),
        ("5 min ago", NOW - 300),
        ("1.5d", NOW + 129_600),
        ("250ms", NOW + 0.25),
        ("2026-01-31", 1_769_817_600.0),
        ("2026-01-31 09:30", 1_769_851_800.0),
        ("2026-01-31 09:30 UTC", 1_769_851_800.0),
        ("2026-01-31T09:30:00Z", 1_769_851_800.0),
        ("2026-01-31 09:30+01:00", 1_769_848_200.0),
    ],
)
def test_a_time_is_read_as_people_type_it(text: str, seconds: float | None) -> None:
    assert read_time(text, "at", NOW) == seconds


# The last one is long: looking for spans in such a text takes time that grows with its square.
@each("text", ["soon", "1x", "99999999999d", "2026-13-01", "--5m", "1h30", "1s " * 40])
def test_a_time_that_cannot_be_read_names_the_field_and_the_way_out(text: str) -> None:
    with pytest.raises(Problem) as raised:
        read_time(text, "until", NOW)
    assert raised.value.field == "until"
    assert "such as 1h30m" in raised.value.detail


@each(
    "seconds, text",
    [
        (0, "0 s"),
        (0.25, "250 ms"),
        (59.9, "59 s"),
        (65, "1 min 5 s"),
        (3605, "1 h"),
        (-90000, "1 d 1 h"),
    ],
)
def test_a_span_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_charts_take_anything() -> None:
    parts: Any = templates().get_template("parts.html").module
    assert parts.spark([], "") == parts.spark([None, None], "") == ""
    assert "NaN" not in parts.spark([0, 0], "")
    assert parts.spark([1, None, 2, 3], "").count("M") == 2
    drawn = parts.bars([0, 1, 1_000_000], ["a", "b", "c"], "")
    assert drawn.count('class="bar"') == 2  # and the small one is visible
    assert 'height="2.0"' in drawn


def test_the_bars_of_a_span_are_among_what_is_counted() -> None:
    edges = edges_of(frozenset(("minute", "week")))
    assert edges[0] == 0 and edges == sorted(set(edges))
    for one in SPANS.values():
        assert one.whole in edges
    assert SPANS["week"].whole == 7 * 86_400 and SPANS["day"].whole == 86_400


# -- cookies and forms


def asked(*headers: tuple[bytes, bytes], body: bytes = b"") -> Request:
    async def nothing() -> Any:
        raise AssertionError

    request = Request({"method": "POST", "headers": headers}, nothing, [])
    request.body = body
    return request


@each("other", ["a/b=1", 'a={"x":1}', "alone", "é=é", "a@b=c", "x_toc_session=2"])
def test_cookies_of_other_applications_hide_none_of_this_one(other: str) -> None:
    for said in (f"toc_session=1; {other}", f"{other}; toc_session=1; toc_session=2"):
        assert read_cookie(asked((b"cookie", said.encode())), "toc_session") == "1"
    assert read_cookie(asked((b"cookie", other.encode())), "toc_session") == ""
    assert read_cookie(asked(), "toc_session") == ""


def test_a_form_has_bounds() -> None:
    form = (b"content-type", b"application/x-www-form-urlencoded; charset=utf-8")
    assert _fields_of(asked(form, body=b"id=a+b&id=%26&x=")) == {"id": ["a b", "&"], "x": [""]}
    for body, kind in (
        (b"a=" + b"x" * (1 << 20), "too-large"),
        (b"a=1&" * 4000, "bad-request"),
        (b"a=%ff", "bad-request"),
        ("a=é".encode(), "bad-request"),
    ):
        with pytest.raises(Problem) as raised:
            _fields_of(asked(form, body=body))
        assert raised.value.kind == kind
    with pytest.raises(Problem, match="as a browser sends"):
        _fields_of(asked(body=b"a=1"))


# -- the audit log


class Told:
    """A center that is told entries of the log."""

    def __init__(self) -> None:
        self.entries: list[list[Any]] = []

    async def call(self, write: Any) -> None:
        center = SimpleNamespace(keys=SimpleNamespace(audit="audit"), client=self)
        write(center)

    def xadd(self, key: str, fields: dict[bytes, str], **how: Any) -> None:
        self.entries.append(json.loads(fields[b"e"]))


def test_an_act_that_fails_on_its_way_is_noted_too(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    audit = Audit(told)  # type: ignore[arg-type]

    async def act(error: Exception | None) -> None:
        async with audit.doing("anna", "cancel", "mail", "order-7\nben: purge") as doing:
            doing.number = 3
            if error is not None:
                raise error

    async def three() -> None:
        await act(None)
        with pytest.raises(ConnectionError):
            await act(ConnectionError("gone"))
        with pytest.raises(Problem):
            await act(Problem("conflict", "nothing was done"))

    caplog.set_level("INFO", "kombu_toc.audit")
    asyncio.run(three())
    assert [entry[:3] + entry[4:] for entry in told.entries] == [["anna", "cancel", "mail", 3]] * 2
    assert told.entries[1][3].startswith("failed: the broker cannot be reached")
    lines = [record.getMessage() for record in caplog.records if "anna" in record.getMessage()]
    assert lines[0] == "anna: cancel in 'mail', order-7\\nben: purge: 3"
    assert len(lines) == 2 and all("\n" not in line for line in lines)


@each(
    "number, late, more, said",
    [
        (10, 0, False, "Done: 10 messages cancelled."),
        (7, 3, False, "Done: 7 messages cancelled."),
        (7, 1, False, "cancelled. 2 more that were counted are gone, or were moved meanwhile."),
        (10, 0, True, "cancelled. More match than were counted: begin it again for those."),
    ],
)
def test_a_job_says_what_became_of_all_that_were_counted(
    number: int, late: int, more: bool, said: str
) -> None:
    job = Job("j", "cancel", Selection("mail"), "anna", phase="done", is_meant=True)
    job = job._replace(matching=10, number=number, late=late, more=more)
    come: Any = templates().get_template("come.html").module
    assert come.come(job, ACTS[job.act]).endswith(said)


# -- messages


async def test_messages_are_expanded_beside_the_event_loop() -> None:
    """What they expand to takes its time, and others ask meanwhile: on the page, and as JSON."""
    threads: list[threading.Thread] = []

    class Extras(PageExtras):
        def parts(self, *asked: Any) -> Any:
            threads.append(threading.current_thread())
            return super().parts(*asked)

    def shown(*_: Any, **how: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {}

    some = [found(envelope(b"[[], {}, {}]", task="t"))] * 3
    page = [one async for one in Reader(Mask(), Extras()).read_all(some, 0)]
    assert [one.task for one in page] == ["t"] * 3
    get = AsyncMock(return_value=some[:1])
    api = SimpleNamespace(shown=shown, center=SimpleNamespace(get=get))
    request = SimpleNamespace(token=None)
    await tasks.shown_page(api, request, Page(some, None))  # type: ignore[arg-type]
    await tasks.get(api, request, "mail", "id-1")  # type: ignore[arg-type]
    assert len(threads) == 7 and threading.main_thread() not in threads


# -- dead letters


async def test_all_viewers_share_a_look_at_the_dead_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dead:
        scans = 0

        async def scan(self, queue: str, **how: Any) -> Page:
            self.scans += 1
            await asyncio.sleep(0)
            return Page([found(b"{}", f"ValueError: {n % 2}") for n in range(5)], None)

    center = Dead()
    dead_letters = DeadLetterGroups(center, Reader(Mask(), PageExtras()))  # type: ignore[arg-type]
    for queue in ("mail", "sms"):
        seen = await asyncio.gather(*(dead_letters.look(queue, 5, 9, 0) for _ in range(20)))
        assert [(one.number, one.error) for one in seen[0].groups] == [
            (3, "ValueError: 0"),
            (2, "ValueError: 1"),
        ]
        assert all(one is seen[0] for one in seen)
    assert center.scans == 2
    monkeypatch.setattr(groups_module, "LEAST", 0.0)
    monkeypatch.setattr(groups_module, "SHARE", 0.0)
    await dead_letters.look("mail", 5, 8, 0)
    await dead_letters.look("mail", 5, 8, 0)
    assert center.scans == 4
    monkeypatch.setattr(groups_module, "SHARE", 1e9)
    await dead_letters.look("mail", 5, 8, 0)
    await dead_letters.look("mail", 5, 8, 0)
    assert center.scans == 5
    dead_letters.forget("mail")  # who has changed something sees it
    looking = asyncio.create_task(dead_letters.look("mail", 5, 8, 0))
    await asyncio.sleep(0)
    dead_letters.forget("mail")  # also if a look has begun before
    await looking
    await dead_letters.look("mail", 5, 8, 0)
    await dead_letters.look("mail", 5, 8, 0)
    assert center.scans == 7


# -- selections


def test_a_selection_is_read_and_said_in_words() -> None:
    chosen = Selection.of(
        {"queue": "mail", "state": "dead", "task": "shop.*", "until": "1h", "reason": "x"}, NOW
    )
    assert chosen.until == NOW + 3600
    assert chosen.described() == (
        "dead messages of shop.* in mail before 2027-01-15 09:00:00 UTC that died because 'x'"
    )
    assert Selection("mail", since=-1.0).described() == (
        "waiting messages in mail not before 1969-12-31 23:59:59 UTC"
    )
    assert chosen.looks_inside and not Selection("mail").looks_inside
    for bad in ({}, {"queue": "mail", "state": "lost"}, {"queue": "mail", "since": "x"}):
        with pytest.raises(Problem):
            Selection.of(bad, NOW)


def test_scheduled_and_ready_are_told_apart_by_the_clock() -> None:
    assert Selection("mail", "scheduled").scanned(NOW)["since"] == NOW
    assert Selection("mail", "ready").scanned(NOW)["until"] == NOW
    assert Selection("mail", "ready", until=NOW - 9).scanned(NOW)["until"] == NOW - 9
    assert Selection("mail", "any").scanned(NOW)["state"] is None


def test_a_pattern_of_a_task_has_no_sets() -> None:
    shown = read(envelope(b"[[],{},{}]", task="a[1]"))
    assert Selection("mail", task="a[1]").matches(shown)
    assert Selection("mail", task="a*").matches(shown)
    assert not Selection("mail", task="A*").matches(shown)


def test_the_last_line_of_an_error_tells_it_from_others() -> None:
    assert last_line("Traceback:\n  x\nValueError: no\n\n") == "ValueError: no"
    assert last_line("") == ""


@each(
    "back",
    [
        "https://evil.example/",
        "//evil.example",
        "javascript:alert(1)",
        "../x",
        "queue\r\nx: y",
        "é",
    ],
)
def test_nobody_is_led_away(back: str) -> None:
    class Asked:
        @staticmethod
        def field(name: str) -> str:
            return back

    assert _back(Asked(), "queue?queue=mail") == "queue?queue=mail"  # type: ignore[arg-type]
