"""Topics, their slots and the names of their keys (A1, A2, A4)."""

from __future__ import annotations

import zlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from kombu_toc import ConfigurationError, Limits, SlotCountError
from kombu_toc.model.limits import LIMITS, MAX_SLOTS, PRIORITY_STEPS, Number, check_steps
from kombu_toc.model.topic import Declaration, Keys, Topic, check_slots, encode_name, slot_of

from ..support.cases import each

names = st.text(st.characters(codec="utf-8"), min_size=0, max_size=30) | st.text(
    "{}%:#7BD25", max_size=12
)
powers = st.integers(0, 9).map(lambda n: 2**n)


def node_slot(key: str) -> int:
    """The hash slot that Redis Cluster gives a key."""
    return key_slot(key.encode())


def topic(name="mail", prefix="toc:", **limits) -> Topic:
    return Topic(name, Declaration.of(name, **limits), prefix)


# -- slots


@each("slots", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
def test_a_slot_count_is_a_power_of_two(slots):
    assert check_slots("mail", slots) == slots


@each("slots", [0, -8, 3, 6, 100, MAX_SLOTS * 2, True, 8.0, "8", None])
def test_any_other_slot_count_is_refused_and_the_topic_named(slots):
    """A1"""
    with pytest.raises(SlotCountError, match=r"'mail'.*power of two") as raised:
        check_slots("mail", slots)
    assert repr(slots) in str(raised.value)


@each(
    ("basis", "crc"),
    [("123456789", 0xCBF43926), ("", 0), ("a", 0xE8B7BE43), ("order-7", zlib.crc32(b"order-7"))],
)
def test_crc_32_of_the_basis_picks_the_slot(basis, crc):
    """A2; 0xCBF43926 is the check value of CRC-32."""
    for slots in (1, 8, 512):
        assert slot_of(basis, slots) == crc % slots


@given(st.text(), powers)
def test_every_language_that_has_crc_32_finds_the_same_slot(basis, slots):
    """A2"""
    crc = zlib.crc32(basis.encode("utf-8", "surrogatepass"))
    assert topic(slots=slots).slot_for(basis).number == crc % slots


# -- keys


@given(names, powers, names)
def test_all_keys_of_a_slot_live_on_one_cluster_node(name, slots, id):
    """A4: a script may touch them all, whatever the topic is called."""
    made = topic(name, slots=slots)
    slot = made.slot(slots - 1)
    keys = [*slot.all(), slot.copies(id)]
    assert len({node_slot(key) for key in keys}) == 1
    assert node_slot(keys[0]) == node_slot(f"{encode_name(name)}:{slots - 1}")


@given(names, names)
def test_the_keys_of_no_single_slot_share_a_cluster_node(name, exchange):
    """One command may wait on many topics."""
    keys = Keys("app:toc:")
    every = [keys.topics, keys.expiring, keys.wake(name), keys.bindings(exchange)]
    every += [keys.fanout(exchange), keys.part(exchange, "*"), keys.part(exchange, "3")]
    every += [keys.parts(exchange), keys.bound(exchange)]
    assert len(set(every)) == len(every)
    assert {node_slot(key) for key in every} == {node_slot("toc")}


@given(names, names, st.integers(0, 9), st.integers(0, 9))
def test_different_slots_have_different_keys(one, other, number, another):
    first, second = topic(one, slots=16).slot(number), topic(other, slots=16).slot(another)
    same = (one, number) == (other, another)
    assert bool(set(first.all()) & set(second.all())) is same


@given(names)
def test_a_slot_has_no_two_keys_of_one_name(id):
    slot = topic().slot(0)
    keys = [*slot.all(), slot.copies(id)]
    assert len(set(keys)) == len(keys)


@each("name", ["{", "}", "{}", "a{b}c", "%", "%7B", "{toc}"])
def test_a_name_with_braces_or_percent_signs_stays_apart_from_what_it_is_encoded_to(name):
    assert encode_name(name) != name
    assert encode_name(encode_name(name)) != encode_name(name)


@each("prefix", ["{", "a}", "{app}:"])
def test_a_prefix_that_would_take_over_the_hash_tag_is_refused(prefix):
    with pytest.raises(ConfigurationError, match="braces"):
        Keys(prefix)


def test_every_key_begins_with_the_prefix():
    slot = topic(prefix="app:toc:").slot(3)
    assert all(key.startswith("app:toc:{mail:3}:") for key in [*slot.all(), slot.copies("x")])


# -- declarations


def test_what_a_declaration_leaves_out_takes_the_default():
    assert Declaration.of("mail", slots=None, retries=None) == Declaration()
    assert (Declaration().slots, Declaration().retries) == (8, 16)


@given(
    powers,
    st.integers(0, 31),
    st.none() | st.integers(1, 10**6) | st.floats(1, 10**6),
    st.none() | st.integers(1, 10**9),
)
def test_a_declaration_comes_back_from_redis_as_it_was_made(slots, retries, visibility, expires):
    made = Declaration.of(
        "mail", slots=slots, retries=retries, visibility=visibility, expires=expires
    )
    assert Declaration.from_json(made.to_json()) == made
    assert Declaration.from_json(made.to_json().encode()) == made


def test_what_a_reshard_leaves_has_the_names_in_redis_that_older_releases_read():
    made = Declaration(4, draining_counts=(8, 16), previous_counts=(8,))
    assert made.to_json() == '{"slots":4,"retries":16,"was":[8,16],"formerly":[8]}'
    assert Declaration.from_json(made.to_json()) == made
    assert Declaration(4).over(made.to_json()) == '{"slots":4,"retries":16}'


def test_a_declaration_of_a_newer_release_can_be_read():
    assert Declaration.from_json('{"slots":4,"colour":"red"}') == Declaration(slots=4)


@each(
    ("limits", "named"),
    [
        ({"slots": 12}, "slot count"),
        ({"retries": 32}, "retries"),
        ({"retries": -1}, "retries"),
        ({"retries": 1.5}, "retries"),
        ({"retries": True}, "retries"),
        ({"visibility": 0.5}, "visibility"),
        ({"visibility": "soon"}, "visibility"),
        ({"visibility": float("nan")}, "visibility"),
        ({"expires": 0}, "expires"),
        ({"expires": 0.5}, "expires"),
        ({"expires": "1000"}, "expires"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_and_the_topic_named(limits, named):
    """A1, W2"""
    with pytest.raises(ConfigurationError, match=f"'mail'.*{named}"):
        Declaration.of("mail", **limits)


def test_a_visibility_timeout_given_as_text_is_a_number_of_seconds():
    assert Declaration.of("mail", visibility="30").visibility == 30.0


@each("seconds", [0, 0.99, -1, 10**10, None, "", "x", float("inf")])
def test_a_visibility_timeout_below_a_second_or_without_end_is_refused(seconds):
    with pytest.raises(ConfigurationError, match="worker"):
        LIMITS["visibility"].check("worker", seconds)


@each(
    ("name", "must"),
    [
        ("slots", "a power of two from 1 to 512"),
        ("retries", "a whole number from 0 to 31"),
        ("visibility", "a number of seconds from 1 up"),
        ("expires", "a whole number of milliseconds from 1 up"),
        ("retry_backoff", "a number of seconds from 0 up"),
        ("retry_backoff_max", "a number of seconds from 0 up"),
        ("dead_age", "a number of seconds from 1 up"),
        ("dead_limit", "a whole number from 1 up"),
        ("max_lease", "a number of seconds from 1 up, or 0 for none"),
        ("message_ttl", "a whole number of milliseconds from 0 up"),
        ("dead_expired", "true or false"),
    ],
)
def test_an_error_says_what_a_limit_must_be(name, must):
    assert LIMITS[name].must == must
    with pytest.raises(ConfigurationError, match=f"^x must be {must}, not 'y'$"):
        LIMITS[name].read("x", "y")


@given(st.integers(-(10**13), 10**13) | st.floats() | st.booleans() | st.text(max_size=3))
def test_a_limit_that_is_accepted_is_within_its_bounds_whoever_gives_it(value):
    for number in LIMITS.values():
        for accept in (number.check, number.read):
            try:
                taken = accept("x", value)
            except ConfigurationError:
                continue
            if not isinstance(number, Number):
                assert accept("x", taken) == taken
                continue
            assert type(taken) is number.kind
            assert (number.zero and not taken) or number.least <= taken <= number.most


def test_a_declaration_takes_whole_numbers_only_and_an_option_text_as_well():
    retries = LIMITS["retries"]
    assert retries.read("toc_retries", "7") == retries.check("retries", 7) == 7
    for value in ("7", 7.0, True):
        with pytest.raises(ConfigurationError):
            retries.check("retries", value)


# -- priority steps


@each(
    ("priority", "step"),
    [(0, 0), (1, 0), (2, 0), (3, 3), (5, 3), (6, 6), (8, 6), (9, 9), (255, 9), (-1, 0)],
)
def test_a_priority_belongs_to_the_highest_step_that_does_not_exceed_it(priority, step):
    """K3, as in Kombu's Redis transport"""
    made = topic()
    assert PRIORITY_STEPS[made.step_index(priority)] == step


def test_each_step_has_a_store_and_the_first_no_suffix():
    slot = Topic("mail", Declaration(), "toc:", (0, 5)).slot(1)
    assert slot.stores == ("toc:{mail:1}:store", "toc:{mail:1}:store:5")


@each("steps", [(0,), [0, 3], range(10), ["0", "5"]])
def test_steps_are_increasing_numbers_from_0(steps):
    assert check_steps(steps) == tuple(int(step) for step in steps)


@each("steps", [(), (1, 2), (0, 0), (3, 0), range(11), "ab", None, 5])
def test_other_steps_are_refused(steps):
    with pytest.raises(ConfigurationError, match="priority_steps"):
        check_steps(steps)


@pytest.mark.parametrize("nodes", [2, 4])
def test_the_slots_of_any_topic_are_spread_evenly_over_the_nodes_of_a_cluster(nodes: int) -> None:
    """With the hash slots split evenly among them. CRC16 spreads consecutive numbers better than
    chance would."""
    for number in range(300):
        topic = Topic(f"queue-{number}.{number:x}", Declaration(slots=64), "toc:")
        load = Counter(key_slot(slot.body.encode()) * nodes // 16384 for slot in topic.all_slots())
        assert max(load.values()) <= 1.25 * 64 / nodes, topic.name


# -- limits that look odd and are not


def test_a_number_of_dead_messages_may_be_written_as_a_float():
    assert Declaration.of("mail", dead_limit=1e5).dead_limit == 100_000
    with pytest.raises(ConfigurationError, match=r"whole number from 1 up, not 1\.5"):
        Declaration.of("mail", dead_limit=1.5)


def test_what_holds_for_topics_that_say_nothing_has_to_be_said():
    """Only a declaration may leave a limit to others."""
    assert Declaration.of("mail", visibility=None).visibility is None
    assert Limits().checked("limits").message_ttl is None  # said by not saying it
    for name in set(Limits._fields) - {"message_ttl", "requeue_limit"}:
        with pytest.raises(ConfigurationError, match=r"limits: .*, not None"):
            Limits(**{name: None}).checked("limits")
