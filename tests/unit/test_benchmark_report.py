"""What the benchmarks make of their numbers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import databases, report, run
from benchmarks.measure import CASES, takes_part
from benchmarks.metrics import percentile
from benchmarks.peers import TITLES
from benchmarks.targets import BEST, ITSELF, TARGETS, Target


def a_run(case: str, metric: str, **peers: list[float | None]) -> report.Run:
    """A run of one case, with these values of a metric in each round."""
    rounds: dict[str, list[dict[str, Any] | None]] = {
        peer: [None if value is None else {metric: value} for value in values]
        for peer, values in peers.items()
    }
    return {
        "form": "short",
        "machine": {"processors": 2, "model": "", "memory_gb": 1, "system": "", "load": [0, 0]},
        "servers": {},
        "versions": {},
        "titles": {peer: TITLES[peer] for peer in peers},
        "notes": [],
        "arguments": {case: CASES[case].CASES[case][1]},
        "cases": {case: rounds},
        "failures": [],
    }


def is_measured(target: Target) -> bool:
    kind, _, case = target.against.partition(":")
    if case:
        against = kind == "case" and target.metric in CASES[case].METRICS
    else:
        against = target.against in (BEST, ITSELF, *TITLES)
    return target.metric in CASES[target.case].METRICS and against


def test_every_target_is_about_something_that_is_measured() -> None:
    assert [target for target in TARGETS if not is_measured(target)] == []


def test_a_ratio_is_taken_within_a_round_and_its_median_is_judged() -> None:
    # The machine was half as fast in the second round; by all medians it would be 3.0.
    run = a_run("drain", "rate", toc=[3000.0, 1400.0, 3300.0], redis=[1000.0, 500.0, 1000.0])
    target = Target("drain", "rate", ">=", 3.0, "redis")
    assert report.judged(run, target) == [3.0, 2.8, 3.3]
    assert ">= 3 of Kombu redis://: met" in report.text(run)


def test_the_best_peer_is_the_one_with_most_where_more_is_better() -> None:
    run = a_run("storm", "rate", toc=[2000.0], redis=[500.0], valkey=[1000.0])
    assert report.judged(run, Target("storm", "rate", ">=", 1.3, BEST)) == [2.0]


def test_the_best_peer_is_the_one_with_least_where_less_is_better() -> None:
    run = a_run("spread", "p99", toc=[4.0], redis=[400.0], valkey=[5.0])
    assert report.judged(run, Target("spread", "p99", "<=", 0.8, BEST)) == [0.8]
    assert "<= 0.8 of the best: met" in report.text(run)


def test_a_target_that_is_missed_is_said_to_be() -> None:
    run = a_run("behind", "waited", toc=[0.0, 4.0, 4.0], redis=[4.0, 4.0, 4.0])
    assert "<= 0: NOT met" in report.text(run)


def test_a_round_that_failed_counts_in_no_ratio() -> None:
    run = a_run("drain", "rate", toc=[3000.0, None], redis=[1000.0, 500.0])
    assert report.judged(run, Target("drain", "rate", ">=", 3.0, "redis")) == [3.0]


def test_a_target_without_its_peer_is_not_measured_rather_than_met() -> None:
    run = a_run("drain", "rate", toc=[3000.0])
    assert ">= 3 of Kombu redis://: not measured" in report.text(run)


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (50, 99, 100)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 50) == 7.0


def test_only_lateness_is_measured_with_peers_that_do_not_run_celery() -> None:
    class Other:
        name, is_celery, is_redis, is_product = "rq", False, True, False

    assert [case for case in CASES if takes_part(Other(), case)] == ["lateness"]


def test_a_part_stands_for_all_of_its_cases_and_a_case_for_itself() -> None:
    cases = run._chosen(run._expanded("library"), list(CASES), "--only")
    assert cases == [case for case in CASES if case.startswith("library-")]
    assert run._chosen(run._expanded("drain,unique"), list(CASES), "--only") == ["drain", "unique"]
    assert run._chosen(run._expanded(None), list(CASES), "--only") == list(CASES)
    with pytest.raises(SystemExit, match="no-such"):
        run._chosen(run._expanded("no-such"), list(CASES), "--only")


def test_a_database_that_is_not_there_is_said_to_be_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in filter(None, databases.ENGINES.values()):
        monkeypatch.setattr(kind, "is_there", staticmethod(lambda: False))
    assert [note.partition(":")[0] for note in CASES["library-drain"].notes()] == [
        "The library on postgresql is left out",
        "The library on mariadb is left out",
    ]
    with databases.database("postgresql") as url:
        assert url is None
    with databases.database("sqlite") as url:
        assert url.startswith("sqlite:////")
