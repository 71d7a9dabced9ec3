"""When a node of a Cluster that could not be reached is tried again, under a simulated clock."""

from __future__ import annotations

from kombu_toc.consumer.connections import FIRST_REST, LONGEST_REST, RestingNodes


def test_a_node_that_is_lost_rests_twice_as_long_each_time_and_never_for_long() -> None:
    nodes: RestingNodes[str] = RestingNodes()
    assert nodes.lost("a", 100.0)
    assert nodes.rests("a", 100.0 + FIRST_REST - 0.01)
    assert not nodes.rests("a", 100.0 + FIRST_REST)
    assert not nodes.lost("a", 101.0), "it was lost before"
    assert nodes.rests("a", 101.0 + 2 * FIRST_REST - 0.01)
    for _ in range(10):
        nodes.lost("a", 200.0)
    assert nodes.rests("a", 200.0 + LONGEST_REST - 0.01)
    assert not nodes.rests("a", 200.0 + LONGEST_REST)
    assert not nodes.rests("b", 200.0)


def test_a_node_that_is_reached_begins_anew() -> None:
    nodes: RestingNodes[str] = RestingNodes()
    nodes.lost("a", 100.0)
    nodes.lost("a", 101.0)
    assert nodes.reached("a")
    assert not nodes.reached("a")
    assert nodes.lost("a", 110.0)
    assert not nodes.rests("a", 110.0 + FIRST_REST)


def test_a_node_that_is_replaced_is_forgotten() -> None:
    nodes: RestingNodes[str] = RestingNodes()
    nodes.lost("a", 100.0)
    nodes.lost("b", 100.0)
    assert nodes.keep(["b", "c"]) == ["a"]
    assert not nodes.rests("a", 100.1)
    assert nodes.rests("b", 100.1)
    assert nodes
