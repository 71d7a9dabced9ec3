"""`celery toc topic`: limits are changed while workers and senders run, and these know at once."""

from __future__ import annotations

import time

import kombu_toc

from ..support.cases import each
from ..support.workers import Live, wait_until
from .test_cli import Run

# The fixture comes along with the commands' own tests.
from .test_cli import run as run

#: Seconds within which everybody knows what was changed.
KNOWN = 5.0


def test_a_running_worker_and_a_sender_know_within_five_seconds(live: Live, run: Run) -> None:
    """A lease, a retry and a back-off of the worker's; a priority of the sender's."""
    live.start_workers(1, "-c", "1", task_acks_late=True, task_reject_on_worker_lost=True)
    sent = live.begin("note", "first")
    words = ("--visibility", "25", "--retries", "2", "--retry-backoff", "2m")
    said = run("topic", "set", "celery", *words, "--priority-steps", "0,5", "--json")
    began = time.time()
    assert said.json["changed"] == ["retries", "visibility", "retry_backoff", "steps"]
    time.sleep(KNOWN)  # it is known then, and not earlier for sure
    live.app.tasks["e2e.told"].apply_async(("lost", -1.0), task_id="lost")  # with its process
    live.journal.wait_for("lost", 1)
    wait_until(lambda: [found.state for found in live.toc.get("lost")] == ["waiting"])
    [lost] = live.toc.get("lost")
    assert lost.retries_left == 1
    assert 100 < lost.time_us / 1e6 - began < 150
    live.begin("late_ack", "held", 2.0, task_id="held")
    [held] = live.toc.get("held")
    assert 15 < held.time_us / 1e6 - time.time() <= 25.5
    live.app.tasks["e2e.note"].apply_async(("later",), task_id="later", countdown=600, priority=9)
    [slot] = [live.toc.registry.topic("celery").slot(found.slot) for found in live.toc.get("later")]
    assert live.client.zrange(slot.store(5), 0, -1) == [b"later"]
    assert sent.id not in {found.id for found in live.toc.scan("celery").messages}


def test_what_a_queue_is_declared_with_is_shown_set_and_deleted(run: Run) -> None:
    said = run("topic", "declare", "mail", "--retries", "3", "--visibility", "1m30s")
    assert "retries            3 (declared)" in said.out
    assert "visibility         90s (declared)" in said.out
    assert "dead age           604800s (default)" in said.out
    said = run("topic", "set", "mail", "--retries", "4", "--visibility", "1m30s")
    assert said.out.splitlines() == [
        "retries of 'mail': 4 (declared); it was 3 (declared).",
        "Workers and senders know within five seconds.",
        "Unchanged: visibility.",
    ]
    said = run("topic", "set", "mail", "--visibility", "default", "--priority-steps", "0,9")
    assert "visibility of 'mail': 60s (default); it was 90s (declared)." in said.out
    assert "Messages that wait under 3,6 are delivered like the others." in said.out
    said = run("topic", "declare", "brief", "--expires", "90s")
    assert "90s after its last use" in said.out
    table = run("topic", "list").out
    assert "mail" in table
    assert "(60s)" in table
    assert "brief" not in table
    assert "brief" in run("topic", "list", "--all").out
    assert "brief" in run("topic", "list", "brief").out
    assert run("topic", "delete", "mail", "--yes").out == "Deleted 'mail'.\n"
    assert "mail" not in run("topic", "list").out


def test_what_limits_starts_and_keys_is_set_shown_and_taken_away(run: Run) -> None:
    run("topic", "declare", "mail", "--slots", "1")
    said = run("topic", "set", "mail", "--rate", "600/m", "--rate-burst", "5", "--key-fair", "yes")
    assert said.out.splitlines() == [
        "rate of 'mail': 600/m (declared); it was none (default).",
        "rate burst of 'mail': 5 (declared); it was none (default).",
        "key fair of 'mail': yes (declared); it was none (default).",
        "Workers and senders know within five seconds.",
    ]
    run("topic", "set", "mail", "--key-weights", "gold=3,silver=1.5")
    shown = run("topic", "show", "mail").out
    assert "rate               600/m (declared)" in shown
    assert "key weights        gold=3, silver=1.5 (declared)" in shown
    assert "key order" not in shown
    said = run("topic", "set", "mail", "--rate", "none")
    assert said.out.splitlines()[0] == "rate of 'mail': none (default); it was 600/m (declared)."
    assert "rate" not in run("topic", "show", "mail").out


@each(
    ("words", "code", "said"),
    [
        (("set", "celry", "--retries", "3"), 3, "no queue 'celry'; do you mean 'celery'?"),
        (("show", "nowhere"), 3, "there is no queue 'nowhere'"),
        (("set", "celery"), 2, "say what: --retries, --visibility"),
        (("set", "celery", "--retries", "99"), 2, "--retries must be a whole number from 0 to 31"),
        (("set", "celery", "--visibility", "soon"), 2, "'soon' is not a span of time"),
        (("set", "celery", "--dead-expired", "perhaps"), 2, "must be true or false"),
        (("set", "celery", "--priority-steps", "3"), 2, "increasing integers that begin with 0"),
        (("set", "celery", "--slots", "4"), 2, "No such option"),
        (("set", "celery", "--rate", "fast"), 2, "--rate must be a rate such as 100/s, 10/m"),
        (("set", "celery", "--retries", "none"), 2, "--retries must be a whole number"),
        (("set", "celery", "--rate-burst", "3"), 2, "rate_burst says nothing without rate"),
        (("declare", "celery"), 1, "'celery toc topic set celery' changes its limits"),
        (("declare", "mail", "--slots", "3"), 2, "a power of two from 1 to 512"),
        (("delete", "celery"), 2, "pass --yes"),
        (("sett", "celery"), 2, "set"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_changes_nothing(
    run: Run, words: tuple[str, ...], code: int, said: str
) -> None:
    before = run.toc.registry.declared("celery")
    told = run("topic", *words)
    assert (told.code, told.out) == (code, "")
    assert said in told.err
    assert told.err.count("\n") == 1
    assert kombu_toc.TimeoutCenter(run.toc.client).registry.declared("celery") == before
