"""Calls that can be made one."""

from __future__ import annotations

from kombu_toc.scripts.call import ScriptCall, load, merge_announcements


def announcing(key: str, announced: list[int], cleared: list[int]) -> ScriptCall:
    return ScriptCall(load("announce"), (key,), (0, len(announced) // 2, *announced, *cleared), int)


def test_announcements_of_many_calls_are_written_by_one_for_each_wake_index() -> None:
    calls = [
        announcing("a", [1, 100], [2, 50]),
        announcing("b", [7, 700], []),
        announcing("a", [3, 300, 4, 400], []),
    ]
    assert [(call.keys, call.args) for call in merge_announcements(calls)] == [
        (("a",), (0, 3, 1, 100, 3, 300, 4, 400, 2, 50)),
        (("b",), (0, 1, 7, 700)),
    ]


def test_what_was_said_of_an_announcement_last_counts() -> None:
    later_settled = [announcing("a", [1, 100], []), announcing("a", [], [1, 100])]
    assert merge_announcements(later_settled)[0].args == (0, 0, 1, 100)
    said_again = [announcing("a", [], [1, 100]), announcing("a", [1, 100], [])]
    assert merge_announcements(said_again)[0].args == (0, 1, 1, 100)
    # One call settles first and announces then.
    assert merge_announcements([announcing("a", [1, 100], [1, 100])])[0].args == (0, 1, 1, 100)
