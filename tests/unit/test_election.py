"""Which process keeps all topics up, as one of them knows it, under a simulated clock."""

from __future__ import annotations

from kombu_toc.consumer.upkeeper import ATTEMPT_INTERVAL, LEASE, NEVER, Election


def test_a_process_takes_part_while_somebody_consumes_in_it() -> None:
    election = Election()
    assert election.due == NEVER
    election.want("one", 5.0)
    election.want("two", 1.0)
    assert election.due == 0.0
    assert election.interval == 1.0
    assert election.unwant("two")
    assert election.interval == 5.0
    assert not election.unwant("one")
    election.again(107.0)  # an attempt was under way
    assert election.due == NEVER
    election.want("one", 5.0)
    assert election.due == 0.0


def test_who_comes_second_does_not_put_an_attempt_forward() -> None:
    election = Election()
    election.want("one", 5.0)
    election.again(107.0)
    election.want("two", 5.0)
    assert election.due == 107.0


def test_an_elected_process_is_so_from_when_it_asked_and_renews_in_time() -> None:
    election = Election()
    election.result(True, True, asked=100.0, answered=100.5)
    assert election.elected(100.0 + LEASE - 0.1)
    assert not election.elected(100.0 + LEASE)
    assert not election.renewal_due(100.0 + LEASE / 2 - 0.1)
    assert election.renewal_due(100.0 + LEASE / 2)
    election.resign()
    assert not election.elected(100.1)
    assert election.renewal_due(100.1)


def test_that_another_is_elected_is_known_until_it_must_have_been_renewed() -> None:
    election = Election()
    election.result(False, True, asked=100.0, answered=100.5)
    assert not election.elected(100.6)
    assert election.known(100.5 + LEASE + ATTEMPT_INTERVAL - 0.1)
    assert not election.known(100.5 + LEASE + ATTEMPT_INTERVAL)


def test_that_nobody_is_elected_is_no_news_of_anybody() -> None:
    election = Election()
    election.result(False, False, asked=100.0, answered=100.5)
    assert not election.known(100.6)
