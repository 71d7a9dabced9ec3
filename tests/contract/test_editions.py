"""Of several releases of an app, one decides what its schedules are."""

from __future__ import annotations

import pytest
import redis

from kombu_toc import ConfigurationError, Edition, TimeoutCenter


def verdict(center: TimeoutCenter, edition: str, process: str = "", **options: object) -> str:
    return center.recurring.edition(
        "shop", edition, process or f"{edition}@host", **options
    ).verdict


def put(center: TimeoutCenter, edition: str, process: str = "", **options: object) -> None:
    assert verdict(center, edition, process, **options) == "put"
    assert verdict(center, edition, process, what="done") == "in force"


def age(center: TimeoutCenter, client: redis.Redis, seconds: int) -> None:
    """As if nobody had used the edition in force for so long, and nobody put one."""
    key = center.keys.edition("shop")
    for field in ("used", "until"):
        client.hset(key, field, int(client.hget(key, field) or 0) - seconds * 1000)


@pytest.mark.cluster
def test_of_many_processes_one_puts_an_edition_and_the_others_have_nothing_to_do(center):
    assert verdict(center, "old", "first") == "put"
    told = center.recurring.edition("shop", "old", "second")
    assert told[:5] == ("busy", 1, "old", "", "first")
    assert isinstance(told, Edition) and 25 < told.busy <= 30
    assert verdict(center, "old", "first", what="renew") == "put"
    assert verdict(center, "old", "first", what="done") == "in force"
    assert [verdict(center, "old", name) for name in ("first", "second")] == ["in force"] * 2


def test_the_edition_that_came_last_goes_before_those_that_were_there(center):
    for edition in ("one", "two", "three"):
        put(center, edition)
    assert [verdict(center, edition) for edition in ("one", "two", "three")] == [
        *("former", "former"),
        "in force",
    ]
    told = center.recurring.edition("shop", "one", "again")
    assert told[1:5] == (3, "three", "", "three@host")


def test_a_later_release_goes_before_an_earlier_one_whoever_comes_first(center):
    put(center, "nine", release="v1.9")
    put(center, "ten", release="v1.10")
    assert verdict(center, "nine", release="v1.9") == "former"
    assert verdict(center, "unknown", release="v1.9.9") == "former"
    assert verdict(center, "without") == "former"
    put(center, "nine", release="v1.11")
    assert verdict(center, "ten", release="v1.10") == "former"


def test_an_edition_that_takes_a_later_release_keeps_it(center):
    put(center, "same", release="1")
    assert verdict(center, "same", release="3") == "in force"
    assert verdict(center, "same", release="2") == "in force"
    assert center.recurring.edition("shop", "other", "it", release="2")[:4] == (
        "former",
        1,
        "same",
        "3",
    )


@pytest.mark.cluster
def test_a_former_edition_comes_back_when_nobody_has_used_the_latest_for_a_while(center, client):
    """A release that was taken back."""
    put(center, "old")
    put(center, "new")
    age(center, client, 601)
    assert verdict(center, "old", looked=599) == "former"
    put(center, "old", looked=601)
    assert verdict(center, "new") == "former"


def test_what_is_in_use_stays_in_force_for_however_long_others_ask(center, client):
    put(center, "old")
    put(center, "new")
    age(center, client, 601)
    assert verdict(center, "new") == "in force"
    assert verdict(center, "old", looked=10**6) == "former"


def test_an_edition_can_be_put_whatever_is_in_force(center):
    put(center, "old", release="1")
    put(center, "new", release="2")
    put(center, "old", release="1", what="force")
    put(center, "old", release="1", what="force")
    assert verdict(center, "new", release="1") == "former"
    assert center.recurring.edition("shop", "old", "it").generation == 3


@pytest.mark.cluster
@pytest.mark.parametrize("passed", [31, -30 * 86400], ids=["in time", "the clock is set back"])
def test_who_dies_while_it_puts_is_followed_by_another(center, client, passed):
    assert verdict(center, "new", "dies") == "put"
    age(center, client, passed)
    assert verdict(center, "new", "lives") == "put"
    assert verdict(center, "new", "dies", what="renew") == "busy"
    # What the first one put late may be anything: the second has to put all of it once more.
    assert verdict(center, "new", "lives", what="done") == "put"
    assert verdict(center, "new", "lives", what="done") == "in force"


def test_a_former_edition_comes_back_although_the_clock_was_set_back(center, client):
    put(center, "old")
    put(center, "new")
    age(center, client, -30 * 86400)
    assert verdict(center, "old", looked=601) == "former"
    age(center, client, 601)
    assert verdict(center, "old", looked=601) == "put"


def test_who_puts_late_has_the_edition_in_force_put_once_more(center, client):
    assert verdict(center, "old", "stalls") == "put"
    age(center, client, 31)
    put(center, "new")
    assert verdict(center, "old", "stalls", what="renew") == "former"
    assert verdict(center, "new", "any") == "put"
    assert verdict(center, "new", "any", what="done") == "in force"


def test_while_one_edition_is_put_the_next_one_waits(center):
    assert verdict(center, "old", "first") == "put"
    assert verdict(center, "new", "second") == "busy"
    assert verdict(center, "old", "first", what="done") == "in force"
    put(center, "new", "second")


@pytest.mark.cluster
def test_apps_do_not_know_of_each_other(center):
    put(center, "old")
    assert center.recurring.edition("blog", "other", "it").verdict == "put"


@pytest.mark.cluster
def test_a_hundred_former_editions_are_remembered(center, client):
    for number in range(103):
        put(center, f"edition-{number}")
    assert client.zcard(center.keys.editions("shop")) == 100
    assert verdict(center, "edition-2") == "former"
    assert verdict(center, "edition-1") == "put"


@pytest.mark.parametrize("names", [("x" * 201, ""), ("shop", "x" * 201), (7, "")])
def test_what_is_too_long_or_no_text_is_refused(center, names):
    source, release = names
    with pytest.raises(ConfigurationError, match="at most 200 characters"):
        center.recurring.edition(source, "one", "it", release=release)


def test_a_release_that_was_taken_back_by_hand_does_not_return_while_its_processes_go_on(
    center, client
):
    put(center, "one", release="1")
    put(center, "two", release="2")
    put(center, "three", release="3")
    put(center, "one", "operator", what="force", release="1")
    for edition, release in (("two", "2"), ("three", "3")):
        assert verdict(center, edition, release=release) == "former"
    assert verdict(center, "one", release="1") == "in force"
    age(center, client, 700)  # nobody has the one that was forced
    assert verdict(center, "three", release="3", looked=700.0) == "put"
    assert verdict(center, "three", release="3", what="done") == "in force"


def test_after_a_release_was_taken_back_a_later_one_goes_before_it(center):
    put(center, "one", release="1")
    put(center, "two", release="2")
    put(center, "one", "operator", what="force", release="1")
    put(center, "two", release="3")  # the same entries, deployed again
    assert verdict(center, "one", release="1") == "former"
    put(center, "one", release="4")
    assert verdict(center, "two", release="3") == "former"


def test_two_releases_that_were_taken_back_one_after_the_other_both_stay_out(center):
    for release in ("1", "2", "3"):
        put(center, f"of {release}", release=release)
    put(center, "of 2", "operator", what="force", release="2")
    put(center, "of 1", "operator", what="force", release="1")
    for release in ("2", "3"):
        assert verdict(center, f"of {release}", release=release) == "former"
    put(center, "of 3", "operator", what="force", release="3")
    assert verdict(center, "of 2", release="2") == "former"
