"""What the loader makes of the files of scripts (X12)."""

from __future__ import annotations

import pytest

from kombu_toc.scripts.call import load

LINE = "log_change(log, most, 'p', id)\nreturn {id, 1, now, said, unsaid}"


def test_a_line_that_is_meant_for_one_script_is_run_by_that_one_only() -> None:
    assert load("put_logged").text.count(LINE) == 1
    # It takes in what adds the message as it is: a function around it costs more than the log.
    assert "local function put()" not in load("put_logged").text


@pytest.mark.parametrize("name", ["put", "put_unique", "put_unique_logged"])
def test_the_others_that_have_the_line_leave_it_out(name: str) -> None:
    assert LINE not in load(name).text
    assert LINE.partition("\n")[2] in load(name).text
