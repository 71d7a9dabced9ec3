"""Breaks the product on purpose, in one place at a time, and shows that tests of the day see it.

    python -m tests.mutants                 all of them
    python -m tests.mutants lease unique    those whose names have one of these words
    python -m tests.mutants --judge unique  the same, by a short run of ``kombu_toc.verify``
    python -m tests.mutants --judge         those that such a run finds

Each mutant replaces one text of one file, in a copy of this checkout, and runs the part of the
tests that is nearest to it. A line tells for each whether it was caught, how fast, and by which
test. The tests of all parts are run without a mutant first: what fails by itself would catch
anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

#: How many run at once: most wait more than they work.
AT_ONCE = 2

#: Seconds that the tests of one may take; a mutant that makes them hang is caught. And that those
#: of all may.
PATIENCE, PATIENCE_WITH_ALL = 240, 1800


class Mutant(NamedTuple):
    """One defect.

    file: where it is, below the root
    text: what stands there, once; instead: what takes its place
    tests: what is run, as pytest takes it; blanks between
    """

    name: str
    file: str
    text: str
    instead: str
    tests: str

    def apply(self, root: Path) -> None:
        """Break the copy in that folder. Raises ValueError if the text is not there once."""
        file = root / self.file
        before = file.read_text()
        if before.count(self.text) != 1:
            raise ValueError(
                f"{self.name!r}: {self.file} has its text {before.count(self.text)} times, not "
                "once: correct it in tests/mutants.py"
            )
        file.write_text(before.replace(self.text, self.instead))


#: What runs the judge.
JUDGE = "tests/e2e/test_verify.py::test_a_run_keeps_all_promises_and_leaves_nothing_in_the_broker"

SCRIPTS = "kombu_toc/scripts"
CENTER = "tests/contract/test_center"
REPLAYED = "test_a_dead_letter_that_is_replayed_keeps_its_last_error_and_has_all_its_retries"

MUTANTS = [
    # -- deliveries
    Mutant(
        "an acknowledgement leaves the message in prepare",
        f"{SCRIPTS}/operations/ack.lua",
        "call('ZREM', keys[2], args[6]) == 1",
        "call('ZCARD', keys[2]) > 0",
        "tests/contract/test_center_delivery.py::test_an_acknowledged_message_is_gone",
    ),
    Mutant(
        "an acknowledgement of several takes one for another with the same id",
        f"{SCRIPTS}/operations/ack.lua",
        "call('ZREM', keys[before + 2], unpack(args, from, to)) == to - from + 1",
        "call('ZCARD', keys[before + 2]) >= to - from + 1",
        "tests/contract/test_center_delivery.py::"
        "test_a_handler_may_put_its_job_again_for_later_and_then_acknowledge",
    ),
    Mutant(
        "an acknowledgement counts for another message of the id",
        f"{SCRIPTS}/lib/redelivered.lua",
        "if not is_of(token, mine) then return 0 end",
        "if not token then return 0 end",
        "tests/contract/test_identity.py::"
        "test_what_is_said_of_a_message_does_not_touch_another_of_the_same_id",
    ),
    Mutant(
        "the slot is another one than CRC-32 says",
        "kombu_toc/model/topic.py",
        'return _crc32(basis.encode("utf-8", "surrogatepass")) % slots',
        'return (_crc32(basis.encode("utf-8", "surrogatepass")) >> 1) % slots',
        "tests/unit/test_topics.py::test_crc_32_of_the_basis_picks_the_slot",
    ),
    Mutant(
        "who pops takes a clock that was set forward for time that has passed",
        "kombu_toc/center/upkeep.py",
        "may = MAY if self.grace == 0 else self._watch(topic, group[0]).may(now, visibility)",
        "may = MAY",
        "tests/contract/test_upkeep.py::"
        "test_after_a_clock_was_set_forward_who_holds_a_long_lease_has_the_time_to_renew_it",
    ),
    Mutant(
        "a lease that ended costs no retry",
        f"{SCRIPTS}/lib/recover.lua",
        "due_ms * 1000 + retries - 1, id)",
        "due_ms * 1000 + retries, id)",
        "tests/contract/test_center_delivery.py::"
        "test_a_message_comes_back_by_itself_when_its_lease_ends",
    ),
    Mutant(
        "a failure costs no retry",
        f"{SCRIPTS}/operations/reject.lua",
        "due_ms * 1000 + retries - 1, id)",
        "due_ms * 1000 + retries, id)",
        "tests/contract/test_center_delivery.py::"
        "test_a_message_is_delivered_17_times_at_most_then_it_is_dead",
    ),
    Mutant(
        "a lease ends a millisecond early",
        f"{SCRIPTS}/operations/pop.lua",
        "lease = args[16], now_ms + visibility",
        "lease = args[16], now_ms + visibility - 1",
        f"{CENTER}_delivery.py::test_a_lease_lasts_for_the_visibility_timeout_to_the_millisecond",
    ),
    Mutant(
        "renewing a lease does nothing",
        f"{SCRIPTS}/operations/extend.lua",
        "redis.call('ZADD', KEYS[1], ends * 1000 + tonumber(score) % 1000, ARGV[i])",
        "redis.call('ZADD', KEYS[1], score, ARGV[i])",
        "tests/contract/test_center_delivery.py::test_a_renewed_lease_ends_later",
    ),
    Mutant(
        "a message is delivered 20 milliseconds early",
        f"{SCRIPTS}/operations/pop.lua",
        "local passed = soon > 0 and now + args[4]",
        "local passed = soon > 0 and now + 20000 + args[4]",
        "tests/contract/test_center_delivery.py::"
        "test_a_message_is_never_delivered_before_its_action_time",
    ),
    Mutant(
        "messages of one millisecond change their order",
        f"{SCRIPTS}/operations/put.lua",
        "score = last + 1\n",
        "score = last + 0\n",
        "tests/contract/test_center_delivery.py::"
        "test_messages_with_one_action_time_keep_their_publish_order_within_a_slot",
    ),
    Mutant(
        "the wait after a failure does not grow",
        f"{SCRIPTS}/lib/failure.lua",
        "first_ms * 2 ^ math.max(math.min(failures - 1, 40), 0)",
        "first_ms",
        "tests/contract/test_center_failures.py::"
        "test_each_redelivery_waits_twice_as_long_up_to_the_longest_wait",
    ),
    Mutant(
        "a dead letter is dropped",
        f"{SCRIPTS}/lib/failure.lua",
        "  redis.call('ZADD', dead, score, id)\n",
        "",
        "tests/contract/test_center_delivery.py::"
        "test_a_message_that_is_not_to_be_tried_again_is_kept_with_the_reason",
    ),
    Mutant(
        "a dead letter that is requeued loses its error",
        f"{SCRIPTS}/operations/requeue.lua",
        "redis.call('HSET', KEYS[5], id, '\\n' .. err)",
        "redis.call('HDEL', KEYS[5], id)",
        f"{CENTER}_failures.py::{REPLAYED}",
    ),
    Mutant(
        "a dead letter that is requeued has no retries",
        f"{SCRIPTS}/operations/requeue.lua",
        "now_ms * 1000 + tonumber(ARGV[3]), id)",
        "now_ms * 1000, id)",
        f"{CENTER}_failures.py::{REPLAYED}",
    ),
    Mutant(
        "what is in flight is cancelled as if it waited",
        f"{SCRIPTS}/operations/cancel.lua",
        "local wanted = {ARGV[3] == '1', ARGV[4] == '1', ARGV[5] == '1'}",
        "local wanted = {ARGV[3] == '1', ARGV[3] == '1', ARGV[5] == '1'}",
        "tests/contract/test_center_by_id.py::"
        "test_a_message_in_flight_is_cancelled_too_late_and_says_so",
    ),
    Mutant(
        "what must be new is added beside what is there",
        f"{SCRIPTS}/operations/put_special.lua",
        "  if redis.call('HEXISTS', body, id) == 1 then return there(3) end\n",
        "",
        f"{CENTER}_by_id.py::test_a_message_is_ensured_once_whatever_state_it_is_in",
    ),
    Mutant(
        "equal bytes under an id are one message",
        f"{SCRIPTS}/operations/put.lua",
        "not ARGV[6] and redis.call('HGET', body, id) == envelope",
        "redis.call('HGET', body, id) == envelope",
        f"{CENTER}_delivery.py::"
        "test_a_handler_may_put_its_job_again_for_later_and_then_acknowledge",
    ),
    Mutant(
        "a put whose reply was lost is another message",
        f"{SCRIPTS}/operations/put.lua",
        "redis.pcall('SET', KEYS[5], name, 'EX', '60', 'GET')",
        "redis.pcall('SET', KEYS[5], name, 'EX', '60', 'GET') and false",
        f"{CENTER}_delivery.py::"
        "test_a_put_that_the_client_repeats_after_a_lost_reply_is_one_message",
    ),
    Mutant(
        "what a consumer was handed comes back as if nobody had had it",
        f"{SCRIPTS}/operations/release.lua",
        "    if ARGV[3] == '1' then kept = given_back(kept, requeues_of(kept)) end\n",
        "",
        "tests/contract/test_transport.py::"
        "test_what_was_delivered_and_comes_back_says_so_and_keeps_its_place_and_its_retries",
    ),
    Mutant(
        "to put a message off costs a retry",
        f"{SCRIPTS}/operations/reject.lua",
        "      retries = retries + 1\n",
        "",
        "tests/contract/test_transport.py::"
        "test_to_put_a_message_off_costs_no_retry_and_pauses_longer_each_time",
    ),
    Mutant(
        "who keeps the queues up is elected for nobody",
        "kombu_toc/consumer/upkeeper.py",
        "return self._next if self._wanted else NEVER",
        "return self._next",
        "tests/unit/test_election.py::test_a_process_takes_part_while_somebody_consumes_in_it",
    ),
    Mutant(
        "a clock that is set back makes leases longer",
        f"{SCRIPTS}/operations/upkeep.lua",
        "    if ends < score then redis.call('ZADD', prepare, ends, late[i]) end\n",
        "",
        "tests/contract/test_clock_steps.py::"
        "test_leases_of_the_dead_end_no_later_although_the_clock_is_set_back",
    ),
    Mutant(
        "a purge leaves the bodies",
        f"{SCRIPTS}/operations/purge.lua",
        "      redis.call('HDEL', KEYS[2], unpack(ids))\n",
        "",
        "tests/contract/test_center_topics.py::test_purging_deletes_what_waits_and_nothing_else",
    ),
    Mutant(
        "a queue that was declared to stay expires if a former one did",
        f"{SCRIPTS}/operations/use.lua",
        "if standing and not string.find",
        "if false and not string.find",
        "tests/contract/test_expiring_queues.py::"
        "test_one_that_is_deleted_and_declared_to_stay_stays_whoever_has_used_the_former",
    ),
    Mutant(
        "the keys of a queue that stays go with the time of a former one",
        "kombu_toc/center/topics.py",
        "        if topic.declaration.expires:\n            keys = [",
        "        if True:\n            keys = [",
        "tests/contract/test_expiring_queues.py::"
        "test_one_that_is_deleted_and_declared_to_stay_stays_whoever_has_used_the_former",
    ),
    Mutant(
        "a queue that has expired is not declared again by who uses it",
        "kombu_toc/center/topics.py",
        "known = registry.recent(name) or before",
        "known = registry.recent(name)",
        "tests/contract/test_expiring_queues.py::"
        "test_a_queue_that_is_gone_when_its_process_goes_on_is_declared_again",
    ),
    Mutant(
        "with a connection goes a queue that somebody has declared to stay",
        "kombu_toc/transport/channel.py",
        "if declared is None or declared.declaration.expires:",
        "if True:",
        "tests/contract/test_expiring_queues.py::"
        "test_an_exclusive_queue_that_somebody_has_declared_to_stay_does_not_go_with_its_connection",
    ),
    Mutant(
        "a deletion that is owed deletes a queue that somebody has declared to stay",
        "kombu_toc/consumer/holdings.py",
        "if topic is not None and not topic.declaration.expires:",
        "if False:",
        "tests/contract/test_expiring_queues.py::"
        "test_an_exclusive_queue_that_somebody_has_declared_to_stay_does_not_go_with_its_connection",
    ),
    Mutant(
        "a worker that is asked for an id tells nothing of what waits in the center",
        "celery_toc/worker/remote_control.py",
        "one.state == WAITING and one.time_us > now_us",
        "one.state != WAITING",
        "tests/e2e/test_inspect.py::test_a_scheduled_task_is_listed_as_celery_has_it",
    ),
    Mutant(
        "who asks a worker is told the secrets of its broker's options",
        "kombu_toc/transport/transport.py",
        "= mask_secrets(told)",
        "= told",
        "tests/e2e/test_inspect.py::test_no_secret_of_the_broker_is_told_to_who_asks_a_worker",
    ),
    Mutant(
        "that a max lease has passed is forgotten when the connection breaks",
        "kombu_toc/consumer/lease_keeper.py",
        "        results = center.runner.run_each([call for _, call in calls])\n"
        "        overran = leases.take_overran()",
        "        overran = leases.take_overran()\n"
        "        results = center.runner.run_each([call for _, call in calls])",
        "tests/contract/test_heartbeat.py::"
        "test_that_a_max_lease_has_passed_is_told_and_counted_when_the_server_is_back",
    ),
    Mutant(
        "who waits claims of the first queue that it names before all others",
        "kombu_toc/center/waiting.py",
        "_rotated(self._topics, next(self._shared.listens))",
        "list(self._topics)",
        "tests/contract/test_waiting.py::"
        "test_a_topic_of_which_many_times_are_claimed_delays_the_claims_of_no_other",
    ),
    Mutant(
        "an earlier time is not announced",
        f"{SCRIPTS}/operations/put.lua",
        "if announced and announced <= us then",
        "if announced then",
        "tests/contract/test_center_topics.py::"
        "test_only_what_is_earlier_than_everything_announced_is_announced",
    ),
    Mutant(
        "what a dead consumer had claimed is not announced again",
        f"{SCRIPTS}/operations/put.lua",
        "announced < now - 100000 and string",
        "false and string",
        "tests/contract/test_center_topics.py::"
        "test_what_a_consumer_claimed_and_then_died_is_announced_again",
    ),
    Mutant(
        "a message that has expired is delivered",
        f"{SCRIPTS}/lib/deliver.lua",
        "if expires and expires < now_ms then return nil end",
        "",
        "tests/contract/test_traits.py::"
        "test_a_message_is_not_delivered_once_it_has_been_due_for_longer_than_its_expiration",
    ),
    Mutant(
        "a delivery is renewed beyond its max lease",
        f"{SCRIPTS}/lib/lease.lua",
        "return last and math.min(ends, last) or ends",
        "return ends",
        "tests/contract/test_traits.py::"
        "test_a_delivery_ends_when_its_max_lease_has_passed_although_it_is_renewed",
    ),
    # -- limits, keys, unique keys, schedules
    Mutant(
        "one more of a key runs than may",
        f"{SCRIPTS}/lib/lanes.lua",
        "running_of(slot, key, gates) >= gates.key_most",
        "running_of(slot, key, gates) > gates.key_most",
        "tests/contract/test_limits.py::test_who_frees_a_place_announces_what_may_start_instead",
    ),
    Mutant(
        "one more of a queue runs than may",
        f"{SCRIPTS}/operations/pop_limited.lua",
        "if not head or running >= whole_most or",
        "if not head or running > whole_most or",
        "tests/contract/test_limits.py",
    ),
    Mutant(
        "one more is put than the rate allows",
        f"{SCRIPTS}/lib/toll.lua",
        "local wait = math.ceil(used - now - us * (burst - 1) - 1)",
        "local wait = math.ceil(used - now - us * burst - 1)",
        "tests/contract/test_put_rates.py::"
        "test_so_many_are_put_as_the_rate_says_and_the_next_is_told_when",
    ),
    Mutant(
        "a unique key is not released when its message is done",
        f"{SCRIPTS}/lib/claim.lua",
        "    return lasts and 2 or nil -- it is done, and perhaps its id is another's by now",
        "    return 2",
        "tests/contract/test_unique.py::"
        "test_a_claim_holds_until_the_message_starts_or_is_done_or_for_a_time",
    ),
    Mutant(
        "a unique key that holds until the start holds until the end",
        f"{SCRIPTS}/lib/claim.lua",
        "return claim.mode ~= '0' and 2 or nil",
        "return 2",
        "tests/contract/test_unique.py::"
        "test_a_claim_holds_until_the_message_starts_or_is_done_or_for_a_time",
    ),
    Mutant(
        "a schedule fires twice",
        f"{SCRIPTS}/operations/recur.lua",
        "if standing ~= ARGV[4] then return",
        "if false then return",
        "tests/contract/test_schedules.py::"
        "test_who_has_read_a_schedule_before_others_went_on_with_it_changes_nothing",
    ),
    Mutant(
        "firings overlap that must not",
        "celery_toc/schedules/state.py",
        'if running and record.overlap == "skip":',
        'if running and record.overlap == "never":',
        "tests/unit/test_schedule_state.py::"
        "test_what_is_next_while_the_former_one_runs_waits_or_is_left_out",
    ),
    Mutant(
        "a range of the past is sent twice",
        "celery_toc/schedules/state.py",
        "after = self._remember([*self.followed, (times[0], times[-1])])",
        "after = self",
        "tests/contract/test_schedules.py::"
        "test_a_range_of_the_past_is_back_filled_once_and_at_a_rate",
    ),
    Mutant(
        "a node of a Cluster that is away keeps schedules of others from being followed",
        "celery_toc/worker/schedules.py",
        "                if not center.clustered:\n                    raise\n",
        "                raise\n",
        "tests/contract/test_schedules.py::"
        "test_a_queue_that_cannot_be_looked_after_holds_up_no_other",
    ),
    # -- the worker's side
    Mutant(
        "what was compressed is read with another dictionary",
        "kombu_toc/model/message.py",
        "        preset += name[:length]\n",
        "",
        "tests/unit/test_envelope.py::test_any_message_comes_out_as_it_went_in",
    ),
    Mutant(
        "leases are renewed after a half, not a third",
        "kombu_toc/consumer/holdings.py",
        "/ BEATS_PER_LEASE\n",
        "/ BEATS_PER_LEASE * 1.5\n",
        "tests/unit/test_leases.py::test_each_lease_is_renewed_by_its_own_visibility",
    ),
    Mutant(
        "a paused queue is asked all the same",
        "kombu_toc/consumer/state.py",
        "        for topic in self.paused:\n            self.slots.pop(topic, None)\n",
        "        for topic in self.paused:\n            pass\n",
        "tests/unit/test_pending.py::test_a_topic_that_goes_on_after_a_pause_is_looked_into",
    ),
    Mutant(
        "a countdown is a time by the sender's clock",
        "kombu_toc/transport/publisher.py",
        "if at_us is not None and properties.get(envelope.COUNTDOWN):",
        "if False:",
        "tests/contract/test_clock_steps.py::test_a_countdown_begins_by_the_clock_as_it_is_set_now",
    ),
    Mutant(
        "a countdown is early if its sender stands still between two clocks",
        "kombu_toc/transport/publisher.py",
        "self._clock, time.time_ns() // 1000, time.monotonic())\n        waits =",
        "self._clock, now=time.monotonic(), wall_us=time.time_ns() // 1000)\n        waits =",
        "tests/contract/test_clock_steps.py::"
        "test_a_countdown_is_not_early_although_its_sender_stands_still_at_any_moment",
    ),
    Mutant(
        "a revoked task waits on",
        "celery_toc/app/revoke.py",
        "if revoke is None or not _removes(connection):",
        "if True:",
        "tests/e2e/test_revoke.py::"
        "test_without_any_worker_a_revoked_task_has_its_result_and_leaves_nothing",
    ),
    Mutant(
        "a solo worker that ends keeps what was not begun",
        "kombu_toc/consumer/outbox.py",
        "            self._center.runner.run_all("
        "self._center.commands.release(deliveries, handed=handed))\n",
        "            pass\n",
        "tests/e2e/test_shutdown.py::"
        "test_a_warm_shutdown_gives_back_at_once_what_was_not_begun[solo]",
    ),
    Mutant(
        "broadcasts that are read unhurriedly are read a page a pause",
        "kombu_toc/consumer/blocking.py",
        "            self.next_reading, self.changed = 0.0, True\n            return True\n",
        "            return True\n",
        "tests/contract/test_broadcasts.py::"
        "test_events_that_come_faster_than_a_page_a_pause_are_read_without_falling_behind",
    ),
    # -- the library, the HTTP API, the notifier
    Mutant(
        "a row is not written",
        "kombu_toc/library/recorder.py",
        "                self.store.insert(some)\n",
        "                pass\n",
        "tests/engines/test_library.py::test_a_publish_writes_a_row_and_puts_the_message",
    ),
    Mutant(
        "a row with a business id lies in the table of its job id",
        "kombu_toc/model/delivery.py",
        "    if len(token) == _LENGTH:\n        try:",
        "    if not token:\n        try:",
        "tests/engines/test_library_shards.py::test_a_row_lies_in_the_table_of_its_business_id",
    ),
    Mutant(
        "rows are used before they are moved",
        "kombu_toc/library/shards.py",
        "        self.pull(keys)\n",
        "",
        "tests/engines/test_library_shards.py::test_a_library_gets_another_layout_while_it_is_used",
    ),
    Mutant(
        "what has ended begins again in the backlog",
        "kombu_toc/library/recorder.py",
        "return before if before.has_ended and not since.has_ended else since",
        "return since",
        "tests/engines/test_library_backlog.py::test_what_has_ended_does_not_begin_again",
    ),
    Mutant(
        "a token may do what its roles do not say",
        "kombu_toc/http/tokens.py",
        "        if role not in self.roles:\n            return False\n",
        "",
        "tests/contract/test_http_security.py",
    ),
    Mutant(
        "a token may do it to any queue",
        "kombu_toc/http/tokens.py",
        "return self.sees(queue) if queue is not None else",
        "return True if queue is not None else",
        "tests/contract/test_http_security.py",
    ),
    Mutant(
        "a token that is removed goes on",
        "kombu_toc/http/tokens.py",
        "tuple(before.get(one.said, one) for one in self._reread())",
        "self.tokens",
        "tests/contract/test_http_security.py::"
        "test_a_token_that_is_removed_ends_and_one_that_is_added_counts_without_a_restart",
    ),
    Mutant(
        "who has not signed in may send as much as who has",
        "kombu_toc/http/page/__init__.py",
        'MAX_FORM if is_in and name != "login" else MAX_ENTRANCE',
        "MAX_FORM",
        "tests/contract/test_page_tokens.py::test_who_has_signed_in_may_send_a_large_form",
    ),
    Mutant(
        "a lease that is answered again has what others have by now",
        "kombu_toc/http/pull.py",
        'bodies.get((one["id"], Delivery.of_receipt(one["receipt"]).birth))',
        'next((body for (id, _), body in bodies.items() if id == one["id"]), None)',
        "tests/contract/test_http.py::"
        "test_a_lease_that_is_answered_again_has_no_message_that_another_consumer_has_by_now",
    ),
    Mutant(
        "what people look at is expanded without a bound",
        "kombu_toc/model/message.py",
        "decompressor.decompress(body, most)",
        "decompressor.decompress(body)",
        "tests/unit/test_task.py::test_a_body_is_expanded_to_a_bound_in_one_stream",
    ),
    Mutant(
        "what the server cannot parse counts as no task",
        "celery_toc/web/operations.py",
        "    except (ValueError, RecursionError):\n        return None\n",
        "    except (ValueError, RecursionError):\n        return False\n",
        "tests/e2e/test_web.py::test_what_this_server_cannot_parse_is_not_let_in",
    ),
    Mutant(
        "a notification is signed without its time",
        "kombu_toc/notify/message.py",
        'signed = f"{id}.{timestamp}.".encode() + body',
        'signed = f"{id}.".encode() + body',
        "tests/unit/test_notifier.py",
    ),
    # -- what runs at night is guarded by day: the guard fails where it would
    Mutant(
        "what Redis has lost is not put again",
        "kombu_toc/library/rebuild.py",
        "return self._putter.put_back([*certain, *claimed])",
        "return self._putter.put_back(claimed)",
        "tests/e2e/test_library.py::test_what_waits_when_redis_is_lost_runs_on_time_and_once",
    ),
    Mutant(
        "a node of a Cluster that was away is not tried again",
        "kombu_toc/consumer/connections.py",
        "return self._resting.get(node, (0.0, 0.0))[0] > now",
        "return node in self._resting",
        "tests/e2e/test_cluster.py::"
        "test_while_a_node_without_replica_is_away_the_others_are_served_and_then_it_is_too",
    ),
]


#: Mutants that a short run of the judge finds.
JUDGED = (
    "an acknowledgement counts for another message of the id",
    "renewing a lease does nothing",
    "a message is delivered 20 milliseconds early",
    "a dead letter is dropped",
    "what is in flight is cancelled as if it waited",
    "what must be new is added beside what is there",
    "equal bytes under an id are one message",
    "one more of a queue runs than may",
    "a unique key is not released when its message is done",
    "a schedule fires twice",
)


def chosen(words: Sequence[str]) -> list[Mutant]:
    return [one for one in MUTANTS if not words or any(word in one.name for word in words)]


def copy_checkout(to: Path) -> None:
    """What git knows of this checkout, as it is now."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_tests(root: Path, tests: Sequence[str], patience: float = PATIENCE) -> tuple[int, str]:
    """The exit code of pytest and what it said. The processes that tests start import the copy."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command,
            cwd=root,
            # A worker that is forked has imported the product of this checkout.
            env={**os.environ, "PYTHONPATH": path, "TOC_TEST_EXEC": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience,
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED {tests[0]} (no end within {patience} seconds)"
    return done.returncode, done.stdout


def judge(mutant: Mutant, root: Path) -> tuple[bool, str]:
    """Whether it is caught, and the line that tells so."""
    before = (root / mutant.file).read_text()
    began = time.monotonic()
    mutant.apply(root)
    try:
        code, said = run_tests(root, mutant.tests.split())
    finally:
        (root / mutant.file).write_text(before)
    took = time.monotonic() - began
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::([\w\[\]., -]+)", said, re.MULTILINE)
    if code == 0:
        return False, f"SURVIVED {took:5.1f} s  {mutant.name}  ({mutant.tests})"
    if code != 1 or failed is None:
        return False, f"NO TESTS {took:5.1f} s  {mutant.name}  (exit {code})\n{said[-2000:]}"
    return True, f"caught   {took:5.1f} s  {mutant.name}  by {failed[1].strip()}"


def judge_all(mutants: Sequence[Mutant], roots: Sequence[Path]) -> Iterator[bool]:
    free: SimpleQueue[Path] = SimpleQueue()
    for root in roots:
        free.put(root)

    def one(mutant: Mutant) -> bool:
        root = free.get()
        try:
            is_caught, line = judge(mutant, root)
        finally:
            free.put(root)
        print(line, flush=True)
        return is_caught

    with ThreadPoolExecutor(len(roots)) as pool:
        yield from pool.map(one, mutants)


def main(words: Sequence[str]) -> int:
    by_judge = "--judge" in words
    asked = [word for word in words if word != "--judge"]
    mutants = chosen(asked or JUDGED if by_judge else asked)
    mutants = [one._replace(tests=JUDGE) for one in mutants] if by_judge else mutants
    if not mutants:
        print("no mutant has such a name:", *(one.name for one in MUTANTS), sep="\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as work:
        roots = [Path(work, str(number)) for number in range(AT_ONCE)]
        for root in roots:
            copy_checkout(root)
        parts = sorted({test for one in mutants for test in one.tests.split()})
        print(
            f"{len(mutants)} mutants; without any, {len(parts)} parts of the tests ...", flush=True
        )
        code, said = run_tests(roots[0], parts, PATIENCE_WITH_ALL)
        if code:
            print(said[-4000:])
            return 1
        caught = list(judge_all(mutants, roots))
    print(f"{caught.count(True)} of {len(mutants)} were caught")
    return 0 if all(caught) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
