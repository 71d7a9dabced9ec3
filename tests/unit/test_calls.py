"""Calls that can be made one."""

from __future__ import annotations

from kombu_toc.scripts.call import Announced, write_announcements


def test_announcements_of_many_calls_are_written_by_one_for_each_wake_index() -> None:
    announced = [
        Announced("a", 0, [1, 100], [2, 50]),
        Announced("b", 0, [7, 700], []),
        Announced("a", 0, [3, 300, 4, 400], []),
    ]
    assert write_announcements(announced, {}) == [
        ("ZREM", "a", "2:50"),
        ("ZADD", "a", 100, "1:100", 300, "3:300", 400, "4:400"),
        ("ZADD", "b", 700, "7:700"),
    ]


def test_what_was_said_of_an_announcement_last_counts() -> None:
    said, settled = Announced("a", 0, [1, 100], []), Announced("a", 0, [], [1, 100])
    assert write_announcements([said, settled], {}) == [("ZREM", "a", "1:100")]
    assert write_announcements([settled, said], {}) == [("ZADD", "a", 100, "1:100")]
    # One call settles first and announces then.
    both = Announced("a", 0, [1, 100], [1, 100])
    assert write_announcements([both], {}) == [("ZADD", "a", 100, "1:100")]


def test_what_was_claimed_is_taken_out_of_no_wake_index_until_it_is_announced_again() -> None:
    said, settled = Announced("a", 0, [1, 100], []), Announced("a", 0, [], [1, 100])
    claimed = {("a", "1:100"): True, ("b", "1:100"): True}
    assert write_announcements([settled], claimed) == []
    assert write_announcements([settled], claimed) == [("ZREM", "a", "1:100")]
    claimed["a", "1:100"] = True
    assert write_announcements([said], claimed) == [("ZADD", "a", 100, "1:100")]
    assert write_announcements([settled], claimed) == [("ZREM", "a", "1:100")]
    assert claimed == {("b", "1:100"): True}
