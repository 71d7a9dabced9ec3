"""Two-phase consumption: put, pop, and every way a delivery can end (A3 to A7, Y3, D2)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kombu_toc import ActionTimeError, ConfigurationError, MessageError, Put, TimeoutCenter
from kombu_toc.model import scores
from kombu_toc.model.results import DEAD, IN_FLIGHT, WAITING

from ..support.cases import night
from ..support.inspection import (
    birth_of,
    check_slots,
    delivered,
    end_lease,
    now_us,
    pop_call,
    put_call,
    put_some,
    residue,
    time_passes,
)
from ..support.proxy import Proxy

HOUR = 3600.0


def pop_ids(center, topic="one", limit=100, **kwargs):
    return [message.id for message in center.pop(topic, limit, **kwargs).messages]


def pop_now(center, topic="one", *, visibility=60.0, **kwargs):
    """Pop through the lower level, which allows leases of less than a second."""
    declared = center.registry.topic(topic)
    return center.runner.run(pop_call(center, declared, visibility=visibility, **kwargs))


# -- action times


def test_a_message_is_never_delivered_before_its_action_time(one, client):
    """A3; sleeps, for the action time must come by itself"""
    start = now_us(client)
    at = start + 200_000  # a busy machine takes some of it until the message is put
    one.put("one", "x", b"", at=at / 1e6)
    while not (popped := one.pop("one")).messages:
        assert popped.now_us < start + 5_000_000
        time.sleep(0.001)
    assert popped.now_us >= at
    assert at <= popped.messages[0].action_us <= at + 3


def test_without_a_time_a_message_is_due_at_once(one):
    message = delivered(one, body=b"body")
    assert (message.topic, message.slot, message.step, message.id) == ("one", 0, 0, "x")
    assert (message.body, message.retries_left, message.failures) == (b"body", 16, 0)


def test_a_past_action_time_means_now(one, client):
    """A7: they come in the order in which they were put, behind what was due before"""
    before = now_us(client)
    one.put("one", "w", b"")
    one.put("one", "x", b"", at=1.0)
    one.put("one", "y", b"", at=-5.0)
    one.put("one", "z", b"", delay=-3)
    check_slots(one, "one")
    popped = one.pop("one", 10)
    assert [message.id for message in popped.messages] == ["w", "x", "y", "z"]
    assert all(before <= message.action_us <= popped.now_us for message in popped.messages)


def test_to_reschedule_to_a_past_time_means_now(one, client):
    put_some(one, "one", "xy", delay=HOUR)
    before = now_us(client)
    one.put("one", "w", b"")
    for id in "yx":
        one.reschedule(id, topic="one", at=1.0)
    check_slots(one, "one")
    messages = one.pop("one", 10).messages
    assert [message.id for message in messages] == ["w", "y", "x"]
    assert all(before <= message.action_us for message in messages)


def test_a_delay_counts_by_the_servers_clock(one, client):
    before = now_us(client)
    one.put("one", "x", b"", delay=HOUR)
    after = now_us(client)
    [found] = one.get("x", topic="one")
    assert before + 3_600_000_000 <= found.time_us <= after + 3_600_000_003
    assert pop_ids(one) == []


@pytest.mark.parametrize(
    "when", [{"at": 9.1e9}, {"at": float("inf")}, {"delay": 9e9}, {"delay": float("inf")}]
)
def test_an_action_time_beyond_2255_is_refused_and_nothing_kept(one, client, when):
    with pytest.raises(ActionTimeError):
        one.put("one", "x", b"", **when)
    assert residue(client) == []


@pytest.mark.versions
def test_the_scripts_and_the_python_codec_compute_the_same_scores(client):
    """A6"""
    clock = files("kombu_toc.scripts").joinpath("lib/clock.lua").read_text()
    loop = """
local out = {}
for i = 1, #ARGV do
  local us = tonumber(ARGV[i])
  local score = action_score(us)
  out[i] = {score, due_score(us), action_time(score), action_time(math.floor(us / 32))}
end
return out"""
    now = now_us(client)
    times = [*range(2000), *range(now, now + 2000), scores.LAST_MS * 1000 - 1]
    expected = []
    for us in times:
        score = scores.action(us)
        seconds = scores.action_time(score), scores.action_time(us // 32)
        expected.append([score, scores.due(us), *seconds])
    assert client.eval(clock + loop, 0, *times) == expected


# -- what put does


def test_each_put_is_a_message_whatever_its_id_and_its_bytes_are(one):
    """Also a third of the same bytes, and one beside a message in flight or a dead letter."""
    puts = [one.put("one", "x", b"same") for _ in range(3)]
    assert [made.outcome for made in puts] == ["added"] * 3
    assert len({made.id for made in puts}) == 3 and puts[0] == Put("x", "added")
    [flying, dead, _] = one.pop("one", 3).messages
    one.reject(dead, requeue=False)
    assert one.put("one", "x", b"same").added
    assert one.ack([flying]) == 1
    assert one.put("one", "x", b"same").id == "x"
    assert len(one.get("x", topic="one")) == 4
    check_slots(one, "one")
    assert len(one.cancel("x", in_flight=True)) == 4
    assert residue(one.client) == []


def test_a_handler_may_put_its_job_again_for_later_and_then_acknowledge(one):
    """As one that looks every minute whether a refund has arrived."""
    one.put("one", "refund-7", b"look")
    for _ in range(3):
        with one.consume("one", auto_ack=False, idle=0) as jobs:
            for job in jobs:
                assert one.put("one", "refund-7", job.body, delay=HOUR).added
                job.ack()
        [later] = one.get("refund-7", topic="one")
        assert later.state == WAITING and later.time_us > now_us(one.client) + 3000 * 10**6
        time_passes(one, "one", HOUR)


def test_no_put_is_held_by_one_for_later_or_swallowed_by_a_dead_letter(one):
    for delay in (3600, 5):
        one.put("one", "x", b"same", delay=delay)
    assert one.queues.coming("one", [60]) == [1], "the one for later"
    one.reject(delivered(one, id="y", body=b"same"), requeue=False)
    assert delivered(one, id="y", body=b"same").body == b"same"


@pytest.mark.versions
@pytest.mark.one_server("the proxy that loses replies stands before one")
def test_a_put_that_the_client_repeats_after_a_lost_reply_is_one_message(server, client):
    with Proxy(server.port) as proxy:
        retry = Retry(NoBackoff(), 3)
        errors = [redis.ConnectionError]
        with redis.Redis(port=proxy.port, retry=retry, retry_on_error=errors) as behind:
            center = TimeoutCenter(behind)
            center.queues.declare("one", slots=1)
            for how in ("add", "replace"):  # a server that has not the script yet runs nothing
                center.put("one", "warm-up", b"", if_exists=how)
            lost = proxy.drop_replies(b"the only one")
            assert center.put("one", "x", b"the only one") == Put("x", "added")
            assert lost.is_set()
            lost = proxy.drop_replies(b"the latest")
            made = center.put("one", "x", b"the latest", if_exists="replace")
            assert lost.is_set() and made.id == "x"
            assert [found.body for found in center.get("x")] == [b"the latest"]


def test_puts_of_threads_are_told_apart_when_they_are_repeated(one):
    """Each put that is under way has a memory of its own."""
    run = one.runner.executor.replies

    def twice(some):
        run(some)
        barrier.wait()
        return run(some)

    barrier = threading.Barrier(8)
    one.runner.executor.replies = twice
    try:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda n: one.put("one", "x", b"same"), range(8)))
    finally:
        del one.runner.executor.replies
    assert all(put.added for put in made)
    assert one.counts("one").waiting == 8


def test_a_put_with_a_token_is_repeated_by_its_caller(one):
    """Whatever has become of the message, and whatever its bytes are by now."""
    first = one.put("one", "x", b"1", token="order-7")
    assert first == Put("x", "added")
    assert one.put("one", "x", b"1", token="order-7") == Put("x", "repeated")
    assert one.put("one", "x", b"1", token="order-8").added
    copy = one.put("one", "x", b"2", token="order-9")
    assert one.put("one", "x", b"2", token="order-9") == Put(copy.id, "repeated")
    assert one.put("one", "y", b"1", token="order-7").added, "another id"
    one.ack(one.pop("one", 9).messages)
    assert one.put("one", "x", b"1", token="order-7").outcome == "repeated"
    assert one.counts("one").waiting == 0


def test_a_token_is_known_until_an_hour_after_the_message_was_due(one, client):
    one.put("one", "x", b"", token="t", delay=2 * HOUR)
    [key] = client.keys("*:sent:=*")
    assert 3 * HOUR - 60 < client.ttl(key) <= 3 * HOUR
    one.cancel("x")
    assert one.put("one", "x", b"", token="t", delay=2 * HOUR).outcome == "repeated"


# -- replace


def test_a_waiting_message_gets_body_and_time_of_another(one):
    one.put("one", "x", b"old", delay=3600, visibility=30)
    assert one.put("one", "x", b"new", delay=5, if_exists="replace") == Put("x", "replaced")
    [found] = one.get("x", topic="one")
    assert (found.body, found.visibility) == (b"new", None)
    assert one.queues.coming("one", [60]) == [1]
    assert one.put("one", "y", b"", if_exists="replace").outcome == "added"
    check_slots(one, "one")


@pytest.mark.parametrize("state", [IN_FLIGHT, DEAD])
def test_what_is_in_flight_or_dead_is_not_replaced(one, state):
    message = delivered(one, body=b"old")
    if state == DEAD:
        one.reject(message, requeue=False)
    made = [one.put("one", "x", body, if_exists="replace") for body in (b"new", b"newer")]
    assert [put.outcome for put in made] == ["added", "replaced"]
    assert sorted((one.state, one.body) for one in one.get("x", topic="one")) == sorted(
        [(state, b"old"), (WAITING, b"newer")]
    )
    check_slots(one, "one")


def test_of_several_that_wait_the_newest_is_replaced(one):
    for body in (b"1", b"2", b"3"):
        one.put("one", "x", body, delay=HOUR - int(body))
    for newest in (b"4", b"5"):
        assert one.put("one", "x", newest, delay=HOUR, if_exists="replace").outcome == "replaced"
        assert sorted(found.body for found in one.get("x", topic="one")) == [b"1", b"2", newest]
    check_slots(one, "one")


def test_the_newest_may_have_the_id_itself(one):
    """The first has gone, and its id was free; the copy is older."""
    first = delivered(one, body=b"first")
    one.put("one", "x", b"copy", delay=HOUR)
    one.ack([first])
    one.put("one", "x", b"first", delay=HOUR)
    assert one.put("one", "x", b"new", delay=HOUR, if_exists="replace") == Put("x", "replaced")
    assert sorted(found.body for found in one.get("x", topic="one")) == [b"copy", b"new"]


def test_what_came_back_is_replaced_and_its_late_ack_touches_nothing(one):
    message = delivered(one, body=b"old")
    assert one.reject(message, requeue=True, backoff=HOUR) == WAITING
    assert one.put("one", "x", b"new", if_exists="replace").outcome == "replaced"
    assert one.ack([message]) == 0
    [new] = one.pop("one").messages
    assert (new.body, new.failures) == (b"new", 0)


def test_under_another_basis_nothing_is_replaced(center):
    topic = center.queues.declare("mail", slots=2)
    other = next(f"{n}" for n in range(9) if topic.slot_for(f"{n}") != topic.slot_for("x"))
    center.put("mail", "x", b"old", basis=other, delay=HOUR)
    with pytest.raises(MessageError, match=r"waits in slot .* another slot basis"):
        center.put("mail", "x", b"new", if_exists="replace")
    assert [found.body for found in center.get("x")] == [b"old"]
    assert center.put("mail", "x", b"new", basis=other, if_exists="replace").outcome == "replaced"
    assert center.put("mail", "x", b"", if_exists="keep").outcome == "kept"


@pytest.mark.parametrize(
    "how, said",
    [
        ({"if_exists": "overwrite"}, "if_exists is 'add', 'keep' or 'replace', not 'overwrite'"),
        ({"if_exists": "replace", "unique": "k"}, "whose conflict"),
    ],
)
def test_an_if_exists_that_makes_no_sense_is_an_error(one, how, said):
    with pytest.raises(MessageError, match=said):
        one.put("one", "x", b"", **how)
    assert one.counts("one").waiting == 0


def test_a_receipt_cancels_one_and_an_id_all_copies(one):
    for _ in range(3):
        one.put("one", "x", b"same")
    [first, _] = one.pop("one", 2).messages
    [gone] = one.cancel(first.receipt, in_flight=True)
    assert (gone.id, gone.deleted) == (first.id, True)
    assert one.cancel(first.receipt, in_flight=True) == []
    one.put("one", "x", b"another")
    assert one.cancel(first.receipt) == []
    assert len(one.cancel("x", in_flight=True)) == 3
    assert residue(one.client) == []


def test_ensure_adds_nothing_while_a_copy_of_the_id_is_live(one):
    """D3"""
    one.put("one", "x", b"1")
    one.put("one", "x", b"2")
    one.ack(one.pop("one").messages)
    assert one.put("one", "x", b"3", if_exists="keep").outcome == "kept"
    one.ack(one.pop("one").messages)
    assert one.put("one", "x", b"3", if_exists="keep").id == "x"


def test_a_basis_puts_messages_into_one_slot(center):
    """A2, A7"""
    put_some(center, "mail", 20, "", basis="order-7")
    slot = center.registry.topic("mail").slot_for("order-7").number
    assert {message.slot for message in center.pop("mail", 50).messages} == {slot}


@pytest.mark.versions
def test_a_center_refuses_a_client_that_decodes(server):
    with (
        redis.Redis(port=server.port, decode_responses=True) as client,
        pytest.raises(ConfigurationError, match="decode_responses"),
    ):
        TimeoutCenter(client)


@pytest.mark.versions
def test_a_body_may_be_any_bytes(one):
    body = bytes(range(256)) + b"\r\n$-1\r\n"
    one.put("one", "x", body)
    assert one.pop("one").messages[0].body == body


# -- order


def test_messages_come_in_the_order_of_their_action_times(center, client):
    """A3: over all slots, whatever the order they were put in"""
    times = [30, 10, 50, 20, 40]
    now = now_us(client) / 1e6
    for delay in times:
        center.put("mail", f"{delay}", b"", at=now + HOUR + delay)
    time_passes(center, "mail", 2 * HOUR)
    assert pop_ids(center, "mail") == ["10", "20", "30", "40", "50"]


@pytest.mark.parametrize("us", [500, 999])
def test_messages_with_one_action_time_keep_their_publish_order_within_a_slot(one, us):
    """K5, also at the end of a millisecond"""
    ids = [f"{(number * 37) % 101}" for number in range(101)]
    put_some(one, "one", ids, at=2e9 + us / 1e6)
    time_passes(one, "one", 1e9)
    assert pop_ids(one, limit=101) == ids


def test_messages_with_one_action_time_keep_their_publish_order_though_nothing_is_announced(
    one, client
):
    """K5: a limited queue announces elsewhere, which a producer hears of in some seconds."""
    for id in ("z-first", "a-second"):
        one.put("one", id, b"", at=2e9)
        client.delete(one.registry.topic("one").slot(0).announced_times)
    time_passes(one, "one", 1e9)
    assert pop_ids(one, limit=2) == ["z-first", "a-second"]


def test_a_put_over_a_key_that_another_program_has_written_leaves_nothing(one, client):
    """Its repeat would otherwise be taken for the same put, which is there already."""
    slot = one.registry.topic("one").slot(0)
    client.set(slot.announced_times, "x")
    with pytest.raises(redis.RedisError, match="WRONGTYPE"):
        one.put("one", "id", b"")
    assert not client.exists(slot.body, *slot.stores)
    client.delete(slot.announced_times)
    assert one.put("one", "id", b"").added
    assert pop_ids(one) == ["id"]


AT = 2_000_000_000_000  # milliseconds


def fill(client, slot, number):
    """Messages as that many puts with one action time leave them."""
    scores = [(AT + n // 968) * 1000 + 32 + n % 968 for n in range(number)]
    for start in range(0, number, 2000):  # the client has ten seconds' patience for each
        some = {f"{9_999_999 - start - n}": s for n, s in enumerate(scores[start : start + 2000])}
        client.zadd(slot.stores[0], some)
        client.hset(slot.body, mapping=dict.fromkeys(some, b""))


def placed(client, slot, ids):
    """The scores of messages, in this order."""
    with client.pipeline(transaction=False) as pipe:
        for id in ids:
            pipe.zscore(slot.stores[0], id)
        return [int(score) for score in pipe.execute()]


@pytest.mark.parametrize(
    "there, plain",
    [*((0, False), (0, True), (61_888, True)), night(967, True), night(600_000, True)],
)
def test_any_number_of_messages_with_one_action_time_keep_their_publish_order(
    one, client, there, plain
):
    """K5, whatever is taken out of them, and whatever lies behind them"""
    topic = one.registry.topic("one")
    slot = topic.slot(0)
    fill(client, slot, there)
    if there:
        client.zadd(slot.announced_times, {str(AT * 1000): AT * 1000})
    end = AT + there // 968
    others = {f"other {ms}": (AT + ms) * 1000 + 999 for ms in range(7, there // 968 + 100, 7)}
    client.zadd(slot.stores[0], others)
    ids = [f"{(number * 3701) % 4999}" for number in range(4999)]
    some = 500
    for start in range(0, len(ids), some):
        name = (lambda id: {"publish": ("me", f"me.{id}")}) if plain else (lambda id: {})
        calls = [
            put_call(one, topic, id, b"", at_us=AT * 1000, **name(id)) for id in ids[start:][:some]
        ]
        one.runner.run_all(calls)
        # A full millisecond's last place gets free, and some others.
        client.zrem(slot.stores[0], *(others if start == some else ids[start : start + 20]))
        last = client.zrange(slot.stores[0], (end + 1) * 1000 + 999, "+inf", byscore=True)[:1]
        client.zrem(slot.stores[0], *last or ["none"])
    left = [id for id in ids if client.zscore(slot.stores[0], id) is not None]
    assert len(left) > 4500
    scores = placed(client, slot, left)
    assert scores == sorted(set(scores))
    late_ms = scores[-1] // 1000 - AT
    assert late_ms < 1.4 * (there + len(ids)) / 968 + 3


def test_others_are_not_overtaken_by_more_than_must_be(one, client):
    """K5: they lie behind a full millisecond for reasons of their own"""
    topic = one.registry.topic("one")
    slot = topic.slot(0)
    client.zadd(slot.stores[0], {f"other {ms}": (AT + ms) * 1000 + 40 for ms in range(1, 60_000)})
    ids = [f"{number}" for number in range(2000)]
    one.runner.run_all([put_call(one, topic, id, b"", at_us=AT * 1000) for id in ids])
    scores = placed(client, slot, ids)
    assert scores == sorted(set(scores))
    assert scores[-1] < (AT + 4) * 1000


@pytest.mark.one_server("commands are counted at it")
@pytest.mark.parametrize("there", [1000, 62_000, night(600_000)])
def test_a_put_takes_a_bounded_number_of_commands_however_many_have_its_time(one, client, there):
    topic = one.registry.topic("one")
    fill(client, topic.slot(0), there)
    one.put("one", "x", b"", at=AT / 1000)
    client.config_resetstat()
    put_some(one, "one", "abcdefghij", at=AT / 1000)
    stats = client.info("commandstats")
    used = ("cmdstat_zrevrangebyscore", "cmdstat_zcount")
    looks = sum(stats[name]["calls"] for name in used if name in stats)
    assert looks <= 10 * 6


def test_messages_put_for_now_keep_their_publish_order_within_a_slot(one):
    """K5"""
    ids = [f"{(number * 37) % 101}" for number in range(101)]
    topic = one.registry.topic("one")
    one.runner.run_all([put_call(one, topic, id, b"", publish=("me", f"me.{id}")) for id in ids])
    assert pop_ids(one, limit=101) == ids


def test_a_higher_step_waits_for_the_lower_ones(center):
    """K3: 0 goes first, over all slots, whatever the action times; 5 is of the step of 3"""
    for number, priority in enumerate([9, 6, 5, 0, 9, 0, 3]):
        center.put("mail", f"{number}", b"", at=number + 1, priority=priority)
    popped = center.pop("mail", 10)
    assert [message.id for message in popped.messages] == ["3", "5", "2", "6", "1", "0", "4"]
    assert [message.step for message in popped.messages] == [0, 0, 1, 1, 2, 3, 3]


@pytest.mark.one_server("of several nodes each gives a share, not the earliest of all")
def test_the_limit_bounds_a_pop_and_more_says_that_something_was_left(center):
    """Y6"""
    for number in range(10):
        center.put("mail", f"{number}", b"", at=number + 1)
    first = center.pop("mail", 4)
    assert [message.id for message in first.messages] == list("0123")
    assert first.more
    second = center.pop("mail", 6)
    assert [message.id for message in second.messages] == list("456789")
    assert not second.more


@pytest.mark.versions
def test_a_limit_of_thousands_delivers_thousands(one, client):
    """W7, D7; once, Lua unpacked too much at a time and the messages were lost"""
    declared = one.registry.topic("one")
    one.runner.run_all([put_call(one, declared, f"{number}", b"b") for number in range(9000)])
    popped = one.pop("one", 9000)
    assert len(popped.messages) == 9000
    assert [message.id for message in popped.messages[:2]] == ["0", "1"]
    assert {message.body for message in popped.messages} == {b"b"}
    assert client.zcard(declared.slot(0).prepare) == 9000
    assert one.ack(popped.messages) == 9000
    assert residue(client) == []


def test_a_pop_that_does_not_know_yet_of_lanes_gives_nothing_twice(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=8)
    ids = [f"{number:02}" for number in range(12)]
    put_some(center, "mail", ids, basis="one slot")
    slot = center.registry.topic("mail").slot_for("one slot")
    center.client.zadd(slot.stores[0], {f"in a lane {n}": -(10**15) - n for n in range(6)})
    assert [one.id for one in center.pop("mail", 12).messages] == ids
    assert center.client.zcard(slot.stores[0]) == 6


def test_a_pop_of_some_slots_leaves_the_others_alone(center):
    put_some(center, "mail", 40, "")
    popped = center.pop("mail", 100, slots=[5, 2, 2])
    assert {message.slot for message in popped.messages} == {2, 5}
    assert len({message.id for message in popped.messages}) == len(popped.messages)
    check_slots(center, "mail")


# -- horizons


def test_soon_reaches_ahead_and_late_only_behind(one, client):
    """X1: what can start is fetched ahead; what would only queue must have been due for a while"""
    now = now_us(client) / 1e6
    one.put("one", "old", b"")
    one.put("one", "ahead", b"", at=now + 20)
    one.put("one", "far", b"", at=now + HOUR)
    assert pop_now(one, ready_limit=0, overdue_limit=5, behind_us=15_000_000).messages == []
    soon = pop_now(one, ready_limit=3, lookahead_us=60_000_000)
    assert [message.id for message in soon.messages] == ["old", "ahead"]
    assert not soon.more
    check_slots(one, "one")


def due_since(center, **messages):
    """Messages that have been due for so many seconds, and perhaps their priorities."""
    now = now_us(center.client) / 1e6
    for id, (ago, *priority) in messages.items():
        how = {"priority": priority[0]} if priority else {}
        center.put("one", id, b"", at=now + HOUR - ago, **how)
    time_passes(center, "one", HOUR)


def test_late_takes_what_has_been_due_for_long_and_leaves_the_rest_to_idle_workers(one):
    """X1; also over the steps of priorities"""
    due_since(one, a=[30], b=[20], c=[10], d=[0.5])
    popped = pop_now(one, ready_limit=1, overdue_limit=4, behind_us=15_000_000)
    assert [message.id for message in popped.messages] == ["a", "b"]
    assert popped.more
    check_slots(one, "one")
    one.ack(popped.messages)
    one.queues.purge("one")
    due_since(one, fresh=[1, 0], old=[50, 9], new=[0.9, 9])
    popped = pop_now(one, ready_limit=1, overdue_limit=5, behind_us=10_000_000)
    assert [message.id for message in popped.messages] == ["fresh", "old"]
    check_slots(one, "one")


def test_the_two_counts_include_each_other(one):
    due_since(one, **{f"{number}": [100 - number] for number in range(10)})
    assert len(pop_now(one, ready_limit=2, overdue_limit=5, behind_us=1000).messages) == 5
    assert len(pop_now(one, ready_limit=3, overdue_limit=1, behind_us=1000).messages) == 3


def test_a_pop_that_wants_nothing_takes_nothing_and_says_what_is_due(one):
    one.put("one", "x", b"")
    assert pop_now(one, ready_limit=0).messages == []
    assert pop_now(one, ready_limit=0).more
    check_slots(one, "one")


# -- acknowledgement


def test_an_acknowledged_message_is_gone(center, client):
    """A5; alone, and many of several topics at once"""
    assert center.ack([delivered(center, "mail")]) == 1
    assert residue(client) == []
    for number in range(20):
        for topic in ("mail", "mail", "sms"):
            center.put(topic, f"{number}", b"", priority=number % 10)
    messages = [one for topic in ("mail", "sms") for one in center.pop(topic, 50).messages]
    assert center.ack(messages) == 60
    assert center.ack(messages) == 0
    assert residue(client) == []


# -- rejection


def test_a_message_is_delivered_17_times_at_most_then_it_is_dead(one):
    """A6: 16 redeliveries, counted down in the score"""
    one.put("one", "x", b"poison", priority=3)
    left = []
    while messages := one.pop("one").messages:
        left.append(messages[0].retries_left)
        assert messages[0].failures == len(left) - 1
        assert messages[0].step == 1
        state = one.reject(messages[0], requeue=True)
    assert left == list(range(16, -1, -1))
    assert state == DEAD
    [found] = one.get("x", topic="one")
    assert (found.state, found.body) == (DEAD, b"poison")
    assert "no retries left" in found.reason
    check_slots(one, "one")


def test_a_topic_may_allow_no_redelivery_at_all(center):
    """W2"""
    center.queues.declare("once", slots=1, retries=0)
    message = delivered(center, "once")
    assert message.retries_left == 0
    assert center.reject(message, requeue=True) == DEAD


def test_a_rejected_message_goes_ahead_of_everything_untried(one):
    message = delivered(one)
    one.put("one", "old", b"", at=1)
    assert one.reject(message, requeue=True) == WAITING
    assert pop_ids(one) == ["x", "old"]


def test_a_back_off_delays_the_redelivery(one, client):
    message = delivered(one)
    before = now_us(client)
    assert one.reject(message, requeue=True, backoff=HOUR) == WAITING
    [found] = one.get("x", topic="one")
    assert before - 1000 <= found.time_us - 3_600_000_000 <= now_us(client)
    assert pop_ids(one) == []
    check_slots(one, "one")
    one.reschedule("x", topic="one")
    assert one.pop("one").messages[0].retries_left == 15


def test_a_message_that_is_not_to_be_tried_again_is_kept_with_the_reason(one):
    """A6: nothing is deleted silently"""
    message = delivered(one, body=b"body")
    assert one.reject(message, requeue=False, reason="ill-formed ü") == DEAD
    [found] = one.get("x", topic="one")
    assert (found.state, found.body, found.reason) == (DEAD, b"body", "ill-formed ü")
    assert one.counts("one").dead == 1


@pytest.mark.parametrize("delivered_again", [False, True])
def test_a_rejection_after_the_lease_ended_costs_no_second_retry_and_a_final_one_counts(
    one, delivered_again
):
    message = delivered(one, priority=9)
    end_lease(one, message)
    assert one.pop("one", 0).rolled_back == ["x"]
    assert one.reject(message, requeue=True) is None
    if delivered_again:
        assert one.pop("one").messages[0].retries_left == 15
    assert one.reject(message, requeue=False) == DEAD
    check_slots(one, "one")


def test_rejecting_or_releasing_what_is_gone_brings_nothing_back(one, client):
    message = delivered(one)
    one.ack([message])
    assert one.reject(message, requeue=True) is None
    assert one.reject(message, requeue=False) is None
    assert one.release([message]) == 0
    assert residue(client) == []


# -- release


def test_a_released_message_keeps_its_place_its_time_and_its_retries(one):
    """The design: a worker that shuts down gives back what it has not begun"""
    put_some(one, "one", 5, "", at=1000.25)
    one.put("one", "last", b"", priority=3)
    messages = one.pop("one", 6).messages
    assert one.release(messages[1::2]) == 3
    assert one.release(messages[::2]) == 3
    again = one.pop("one", 6).messages
    assert [message._replace(birth=birth_of(message)) for message in again] == messages


def test_a_message_held_ahead_and_released_is_not_due_earlier_than_it_was(one, client):
    """A3"""
    one.put("one", "x", b"", delay=30)
    [found] = one.get("x", topic="one")
    [message] = pop_now(one, ready_limit=1, lookahead_us=60_000_000).messages
    assert one.release([message]) == 1
    [again] = one.get("x", topic="one")
    assert again._replace(token=found.token) == found
    assert pop_ids(one) == []
    check_slots(one, "one")


def test_releasing_a_tried_message_takes_no_retry(one):
    one.reject(delivered(one), requeue=True)
    for _ in range(3):
        [message] = one.pop("one").messages
        assert message.retries_left == 15
        one.release([message])


# -- leases


@pytest.mark.versions
def test_a_message_comes_back_by_itself_when_its_lease_ends(one):
    """A5, Y3; sleeps, for the lease must end by itself"""
    one.put("one", "x", b"")
    [held] = pop_now(one, ready_limit=1, visibility=50).messages
    assert pop_ids(one) == []
    assert one.extend([held], 0.05) == []
    time.sleep(0.1)
    popped = one.pop("one")
    assert popped.rolled_back == ["x"]
    assert popped.messages[0].retries_left == 15
    assert popped.messages[0].failures == 1


@pytest.mark.parametrize("said_by", ["the topic", "who takes it"])
def test_a_lease_lasts_for_the_visibility_timeout_to_the_millisecond(center, said_by):
    """A5: from the moment of the delivery, or of its renewal"""
    center.queues.declare("brief", slots=1, visibility=5 if said_by == "the topic" else 50)
    center.put("brief", "x", b"")
    popped = center.pop("brief", visibility=None if said_by == "the topic" else 5)
    [found] = center.get("x", topic="brief")
    assert scores.read_lease(found.score).ms == popped.now_us // 1000 + 5000
    before = now_us(center.client) // 1000
    assert center.extend(popped.messages, 7) == []
    after = now_us(center.client) // 1000
    [found] = center.get("x", topic="brief")
    assert before + 7000 <= scores.read_lease(found.score).ms <= after + 7000


def test_a_lease_that_keeps_ending_leads_to_the_dead_queue(one):
    """A6"""
    one.put("one", "x", b"body")
    deliveries = 0
    while messages := (popped := one.pop("one")).messages:
        deliveries += 1
        end_lease(one, *messages)
    assert deliveries == 17
    assert popped.died == ["x"]
    [found] = one.get("x", topic="one")
    assert (found.state, found.body) == (DEAD, b"body")
    assert "lease" in found.reason
    check_slots(one, "one")


def test_a_rolled_back_message_keeps_its_priority(one):
    """K3"""
    end_lease(one, delivered(one, id="low", priority=9))
    one.put("one", "high", b"", priority=0)
    popped = one.pop("one", 5)
    assert [(message.id, message.step) for message in popped.messages] == [("high", 0), ("low", 3)]


def test_a_pop_rolls_back_a_bounded_number_of_leases(one):
    put_some(one, "one", 10, "")
    end_lease(one, *one.pop("one", 10).messages)
    assert len(one.pop("one", 0, recover=4).rolled_back) == 4
    assert one.pop("one", 0, recover=0).rolled_back == []
    assert len(one.pop("one", 0).rolled_back) == 6
    check_slots(one, "one")


def test_a_renewed_lease_ends_later(one, client):
    """D2"""
    one.put("one", "x", b"", priority=6)
    [message] = one.pop("one", visibility=2).messages
    before = now_us(client)
    assert one.extend([message], 500) == []
    [found] = one.get("x", topic="one")
    assert found.state == IN_FLIGHT
    assert found.time_us >= before + 499_999_000
    assert scores.read_lease(found.score)[1:] == (2, 16)


@pytest.mark.versions
def test_renewing_names_the_leases_that_had_ended(center):
    put_some(center, "mail", 6, "")
    messages = center.pop("mail", 6).messages
    center.ack(messages[:2])
    end_lease(center, messages[2])
    center.pop("mail", 0)
    assert sorted(center.extend(messages)) == sorted(messages[:3])


def test_a_topic_may_have_a_visibility_timeout_of_its_own(center, client):
    """W2"""
    center.queues.declare("slow", slots=1, visibility=500)
    center.put("slow", "x", b"")
    messages = center.pop("slow").messages
    for _ in range(2):
        assert center.get("x", topic="slow")[0].time_us >= now_us(client) + 490_000_000
        center.extend(messages)
    center.extend(messages, 5)  # what the caller says goes before that
    assert center.get("x", topic="slow")[0].time_us <= now_us(client) + 5_000_000


# -- what should not happen


@pytest.mark.versions
def test_a_server_that_forgot_the_scripts_is_told_them_again(one, client):
    client.script_flush()
    one.put("one", "x", b"")
    client.script_flush()
    [message] = one.pop("one").messages
    client.script_flush()
    assert one.ack([message]) == 1


@pytest.mark.versions
def test_a_batch_to_a_server_that_forgot_the_scripts_is_complete_and_in_order(center, client):
    topics = [center.queues.declare(name, slots=1) for name in "abc"]
    client.script_flush()
    made = center.runner.run_all([put_call(center, topic, topic.name, b"") for topic in topics])
    assert [(put.id, put.added) for put in made] == [("a", True), ("b", True), ("c", True)]
    client.script_flush()
    popped = center.runner.run_all([pop_call(center, topic, ready_limit=1) for topic in topics])
    assert [one.messages[0].id for one in popped] == ["a", "b", "c"]


@pytest.mark.versions
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_batch_runs_as_a_whole_and_raises_the_first_error(center, client, forgotten):
    topics = [center.queues.declare(name, slots=1) for name in "abc"]
    center.put("a", "y", b"", delay=HOUR)
    if forgotten:
        client.script_flush()
    client.set(topics[1].slot(0).body, "not a hash")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        center.runner.run_all([put_call(center, topic, "x", b"") for topic in topics])
    assert center.counts("a").ready == center.counts("c").ready == 1


def test_an_empty_batch_is_no_round_trip(center):
    assert center.runner.run_all([]) == []
    assert center.ack([]) == center.release([]) == 0
    assert center.extend([]) == []
