"""What the commands print, and what they do not let through."""

from __future__ import annotations

import itertools
import os
import re

import pytest

from celery_toc.cli import screen
from celery_toc.cli.screen import Cell, Column, Screen, clean, drawn_table, fitted, plain_table
from celery_toc.cli.status import COLUMNS as STATUS
from celery_toc.cli.status import RATES, bars, line, view

from ..support.cases import each

COLUMNS = (Column("id"), Column("in flight", right=True), Column("error", fold=True))
ROWS = [["order-7", 1200, None], ["x", Cell(3, "red"), "two\nlines"]]


def drawn(columns, rows, width):
    """A table as a terminal of that width shows it."""
    return "\n".join(itertools.chain(*drawn_table(fitted(columns, rows, width))))


def test_plain_text_is_aligned_and_has_no_separators_in_numbers():
    """So that awk and sort can use it."""
    assert plain_table(COLUMNS, ROWS).splitlines() == [
        "ID       IN_FLIGHT  ERROR",
        "order-7       1200  -",
        "x                3  two\\nlines",
    ]


def test_what_comes_from_a_message_cannot_move_the_cursor_or_add_a_line():
    """A task's name or an error may have come from anybody."""
    nasty = "a\x1b[2J\x1b]0;title\x07b\r\nc\x9bd\u202ee"
    assert clean(nasty) == "a\\x1b[2J\\x1b]0;title\\x07b\\r\\nc\\x9bd\\u202ee"
    printed = drawn([Column("name")], [[nasty]], 100)
    assert "\x1b[2J" not in printed
    assert "\x07" not in printed


def test_text_that_is_not_ascii_is_left_as_it_is():
    assert clean("Größe 寸法 📦") == "Größe 寸法 📦"


def test_a_terminal_gets_colours_and_its_width_and_nothing_else_does(monkeypatch, capsys):
    def shown():
        terminal = Screen()
        left_out = terminal.table((*COLUMNS, Column("far", spare=1)), [[*row, 1] for row in ROWS])
        terminal.fields([("id", "x"), ("slots", 8000), ("error", None)])
        terminal.say("late", "yellow")
        return left_out, capsys.readouterr().out

    left_out, plain_text = shown()
    assert not left_out
    assert plain_text.splitlines()[-3:] == ["id     x", "slots  8000", "late"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda **_: os.terminal_size((30, 24)))
    monkeypatch.setenv("TERM", "dumb")
    assert shown() == ([], plain_text)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_: False)
    left_out, text = shown()
    assert left_out == ["far"]
    assert "\x1b[33mlate\x1b[0m" in text
    assert "\x1b[1mslots\x1b[0m  8,000" in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in shown()[1]


def test_bars_show_what_is_there_and_nothing_else():
    assert bars([0, 1, 40, 80], 2) == ["   █", " ▁██"]
    assert bars([0, 0], 1) == ["  "]
    assert bars([1, 1_000_000], 1) == ["▁█"]


def test_a_narrow_terminal_leaves_out_what_is_spare_and_never_cuts_an_id():
    id = "3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11"
    columns = (
        Column("id"),
        Column("task", fold=True),
        Column("died", spare=True),
        Column("reason", fold=True),
    )
    rows = [[id, "shop.mail.newsletter", "2030-12-24 18:00:00", "a long reason, told at length"]]

    assert "died" in drawn(columns, rows, 100)
    assert "died" not in drawn(columns, rows, 70)
    for width in (68, 80, 100):
        assert id in drawn(columns, rows, width)
        assert "task" in drawn(columns, rows, width)


# -- what a terminal has room for


def row(queue, number=0, **more):
    """A queue as `status` and `top` are told of it."""
    counts = dict.fromkeys(("slots", "scheduled", "ready", "in_flight", "dead"), number)
    late = {"oldest_seconds": 90061.0, "late_p50_seconds": 0.0012, "late_p99_seconds": 86399.0}
    rest = {"consumers": 12, "paused": False, "memory_bytes": 123_456_789}
    rates = {"per_second": dict.fromkeys(RATES, number / 7)}
    return {"queue": queue, **counts, **late, **rest, **rates, **more}


def plain(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def look(*rows):
    return {"topics": list(rows), "coming": {"span_seconds": 600.0, "due": [0, 1, 12] * 20}}


@each("number", [7, 12_345, 1_234_567, 98_765_432])
@each("width", [80, 100, 200])
def test_no_digit_is_cut_however_narrow_a_terminal_is(width, number):
    table = fitted(STATUS, [line(row("mail", number)), line(row("news"))], width)
    assert sum(table.widths) + 2 * (len(table.widths) - 1) <= width
    names = [column.name for column in table.columns]
    for name in ("queue", "scheduled", "ready", "in flight", "dead"):
        text = table.rows[0][names.index(name)][0]
        assert len(text) <= table.widths[names.index(name)]
        if name != "queue":
            assert text in (f"{number:,}", screen._short(number))
    assert table.rows[1][names.index("ready")][0] == "0"
    if width >= 200:
        assert len(names) == len(STATUS)
    printed = plain(drawn(STATUS, [line(row("mail", number))], width))
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    assert "late p99" in printed or number > 1_000_000


@each(
    ("number", "text"),
    [
        *((12_345, "12.3k"), (99_949, "99.9k"), (123_456, "123k"), (999_499, "999k")),
        *((999_600, "1.0M"), (1_250_000, "1.2M"), (98_765_432, "98.8M"), (2e9, "2.0G")),
    ],
)
def test_a_number_that_has_no_room_is_rounded_and_not_cut(number, text):
    assert screen._short(number) == text


@pytest.mark.parametrize("colors", [True, False])
def test_top_fits_its_terminal_and_names_every_queue_in_full(colors):
    long = "a-queue-with-a-name-that-is-longer-than-there-is-room-for"
    lines = view("toc+redis://h", look(row("mail", 1_234_567), row(long)), 80, 24, colors=colors)
    assert ("\x1b[36m" in "".join(lines)) is colors
    lines = [plain(one) for one in lines]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    start = next(at for at, one in enumerate(lines) if one.startswith("a-queue"))
    name = ""
    for one in lines[start:]:
        if not one.strip() or one.startswith("coming"):
            break
        name += one.split(" ")[0]
    assert name == long
    assert any("260 within" in one for one in lines)


def test_top_shows_the_liveliest_queues_where_there_is_no_room_for_all():
    rows = [row(f"queue-{n:02}", n if n % 10 == 0 else 0) for n in range(50)]
    lines = [plain(one) for one in view("h", look(*rows), 80, 24)]
    assert len(lines) == 24
    names = [one.split()[0] for one in lines if one.startswith("queue-")]
    assert names == sorted(names)
    assert {"queue-10", "queue-20", "queue-30", "queue-40"} <= set(names)
    assert any(one == f"... and {50 - len(names)} queues with less to do" for one in lines)
    assert any(one.startswith("coming due") for one in lines)
    small = [plain(one) for one in view("h", look(*rows), 80, 8)]
    assert len(small) == 8
    assert not any(one.startswith("coming due") for one in small)


def test_top_tells_that_redis_is_away_above_what_it_last_knew():
    lines = view("h", look(row("mail")), 80, 24, trouble="Redis has been away for 3.0s\x1b[2J: no")
    assert plain(lines[1]) == "Redis has been away for 3.0s\\x1b[2J: no"
    assert any(one.startswith("mail") for one in map(plain, lines))


def test_wide_characters_take_two_columns():
    columns = (Column("queue", fold=True), Column("n", right=True))
    [heading, first] = drawn_table(fitted(columns, [["寸法寸法", 7]], 20), colors=False)
    assert plain(heading[0]) == "queue     n"
    assert plain(first[0]) == "寸法寸法  7"


def test_without_block_characters_bars_are_of_ascii():
    assert bars([0, 1, 40, 80], 2, blocks=False) == ["   #", " .##"]
