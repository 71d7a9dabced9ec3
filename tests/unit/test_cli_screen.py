"""What the commands print, and what they do not let through."""

from __future__ import annotations

import io

import pytest

from celery_toc.cli import screen
from celery_toc.cli.screen import Cell, Column, Screen, clean, plain_table, rich_table
from celery_toc.cli.top import bars

COLUMNS = (Column("id"), Column("in flight", right=True), Column("error", fold=True))
ROWS = [["order-7", 1200, None], ["x", Cell(3, "red"), "two\nlines"]]


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
    console = pytest.importorskip("rich.console").Console(
        file=io.StringIO(), force_terminal=True, width=100
    )
    console.print(rich_table([Column("name")], [[nasty]], 100))
    printed = console.file.getvalue()
    assert "\x1b[2J" not in printed
    assert "\x07" not in printed


def test_what_comes_from_a_message_is_no_markup():
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=100)
    console.print(rich_table([Column("name")], [["[red]x[/nonsense]"]], 100))
    assert "[red]x[/nonsense]" in console.file.getvalue()


def test_text_that_is_not_ascii_is_left_as_it_is():
    assert clean("Größe 寸法 📦") == "Größe 寸法 📦"


def test_without_rich_a_terminal_gets_plain_text(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert Screen().is_rich
    monkeypatch.setattr(screen, "rich", None)
    plain = Screen()
    plain.table(COLUMNS, ROWS)
    plain.fields([("id", "x"), ("slots", 8), ("error", None)])
    assert capsys.readouterr().out.splitlines()[-2:] == ["id     x", "slots  8"]


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

    def printed(width):
        console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=width)
        console.print(rich_table(columns, rows, width))
        return console.file.getvalue()

    assert "died" in printed(100)
    assert "died" not in printed(80)
    for width in (68, 80, 100):
        assert id in printed(width)
        assert "task" in printed(width)
