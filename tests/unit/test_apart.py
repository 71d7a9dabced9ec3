"""Which slots of a Cluster give how many, of what they have told: without a server."""

from __future__ import annotations

import random

from kombu_toc.center.pop import SlotHeads, divided

from ..support.cases import each


@each("seed", range(20))
def test_each_slot_is_asked_for_those_that_are_first_of_all(seed: int) -> None:
    draw = random.Random(seed)
    every = {
        number: sorted((draw.randrange(3), draw.randrange(50)) for _ in range(draw.randrange(30)))
        for number in range(5)
    }
    left, most = draw.randrange(1, 40), draw.randrange(1, 20)
    heads = {number: SlotHeads(some[:most], most) for number, some in every.items() if some}
    for _ in range(20):
        counts, short = divided(heads, left)
        if short is None:
            break
        heads[short] = SlotHeads(every[short][: 2 * heads[short].most], 2 * heads[short].most)
    assert short is None
    got = sorted(head for number, count in counts.items() for head in every[number][:count])
    first = sorted(head for some in every.values() for head in some)[:left]
    if len(heads) > 1:
        assert got == first


def test_a_slot_that_has_told_all_it_was_asked_for_is_asked_again_before_others_go_on() -> None:
    heads = {1: SlotHeads([(0, 1), (0, 2)], 2), 2: SlotHeads([(0, 9), (1, 1)], 2)}
    assert divided(heads, 1) == ({1: 1}, None)
    assert divided(heads, 2) == ({1: 2}, None)
    assert divided(heads, 3) == ({1: 2}, 1)


def test_the_only_slot_is_asked_for_all() -> None:
    assert divided({4: SlotHeads([(0, 1)], 1)}, 7) == ({4: 7}, None)


def test_slots_that_do_not_tell_their_order_are_asked_for_equal_shares() -> None:
    heads = {number: SlotHeads([], 5) for number in range(3)}
    assert divided(heads, 7) == ({0: 3, 1: 2, 2: 2}, None)
