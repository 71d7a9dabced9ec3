"""`celery toc` on many messages and on whole queues, and what it tells before it asks."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import socketserver
import struct
import termios
import threading
import time
from datetime import datetime, timezone
from typing import Any

from celery import Celery, chord
from kombu import Exchange, Queue

import celery_toc
import kombu_toc
from celery_toc import timeout_center

from ..support import nursery
from ..support.cases import each
from ..support.commands import answer
from ..support.inspection import put_call
from ..support.nodes import ROOT
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import Live, wait_until
from .test_cli import CELERY, Run, bury, celery, environment, in_a_terminal, run, send

__all__ = ("environment", "run")  # fixtures

HOUR = 3600


def add(app: Celery, countdown: float | None = None, **options: Any) -> str:
    return app.tasks["e2e.add"].apply_async((1, 2), countdown=countdown, **options).id


def due(toc: kombu_toc.TimeoutCenter, id: str) -> float:
    """When it is due, seconds from now."""
    [found] = toc.get(id)
    return found.time_us / 1e6 - time.time()


# -- many at once


def test_many_are_cancelled_by_queue_task_and_time_and_their_results_are_revoked(run: Run) -> None:
    soon = [send(run.app, f"soon-{i}", HOUR) for i in range(3)]
    late = send(run.app, "late", 5 * HOUR)
    other = add(run.app, HOUR)
    elsewhere = send(run.app, "elsewhere", HOUR, queue="urgent")
    send(run.app, "dead", queue="one-slot")
    [dead] = bury(run.toc, "one-slot")
    words = ("cancel", "--queue", "celery", "--task", "e2e.no*", "--until", "2h", "--yes")
    assert run(*words, "--json").json == {"cancelled": 3, "late": 0, "revoked": 3, "schedules": []}
    assert [run.app.AsyncResult(id).state for id in soon] == ["REVOKED"] * 3
    for id in (late, other, elsewhere, dead):
        assert len(run.toc.get(id)) == 1
        assert run.app.AsyncResult(id).state == "PENDING"
    assert run(*words).out == "No messages match.\n"
    said = run("cancel", "--task", "e2e.note", "--yes")
    assert said.out == "Cancelled 2 messages; 2 results marked REVOKED.\n"
    assert (len(run.toc.get(other)), len(run.toc.get(dead))) == (1, 1)
    said = run("cancel", "--queue", "celery", "--keep-results", "--yes")
    assert said.out == "Cancelled 1 message.\n"
    assert run.app.AsyncResult(other).state == "PENDING"
    assert run.toc.counts("celery").waiting == 0


def test_more_than_a_page_is_cancelled_and_rescheduled(run: Run) -> None:
    """Also to a time within the span that is looked through: each is moved once."""
    send(run.app, "first", HOUR, task_id="a-task")
    [found] = run.toc.get("a-task")
    topic = run.toc.registry.topic("celery")
    now = time.time_ns() // 1000
    for number in range(0, 1200, 400):
        run.toc.runner.run_all(
            [
                put_call(run.toc, topic, f"{n}", found.body, at_us=now + (HOUR + n) * 1_000_000)
                for n in range(number, number + 400)
            ]
        )
    words = ("reschedule", "--queue", "celery", "--since", "30m", "--until", "5h", "--yes")
    # Between two of them: one that is at that time already is not moved.
    eta = datetime.fromtimestamp(now / 1e6 + HOUR + 600.5, timezone.utc).isoformat()
    assert run(*words, "--eta", eta, "--json").json == {"moved": 1201, "late": 0}
    moved_to = now / 1e6 + HOUR + 600
    assert run.toc.count("celery", since=moved_to - 10, until=moved_to + 10) == 1201
    assert run("run", "--queue", "celery", "--yes", "--json").json == {**{"moved": 1201, "late": 0}}
    assert run.toc.counts("celery") == (1201, 0, 0, 0)
    said = run("cancel", "--queue", "celery", "--state", "ready", "--keep-results", "--yes")
    assert said.out == "Cancelled 1,201 messages.\n"
    assert run.toc.counts("celery").waiting == 0


def test_many_are_rescheduled_and_run(app: Celery, run: Run, toc: kombu_toc.TimeoutCenter) -> None:
    ids = [send(app, f"{i}", HOUR) for i in range(3)]
    other = add(app, HOUR)
    said = run("reschedule", "--task", "e2e.note", "--countdown", "1d", "--yes")
    assert re.match(r"Rescheduled 3 messages, due \d{4}-\d\d-\d\dT[\d:]+\+00:00\.\n", said.out)
    assert all(86000 < due(toc, id) < 86500 for id in ids)
    assert 3000 < due(toc, other) < 3700
    assert run("run", "--state", "scheduled", "--until", "2h", "--yes").out == (
        "Rescheduled 1 message, due now.\n"
    )
    assert due(toc, other) <= 0
    run("reschedule", "--task", "e2e.note", "--eta", "2300-01-01", "--yes").fails(2, "2255")


# -- results of what is cancelled


def test_a_cancelled_tasks_result_is_revoked_and_its_chord_fails(app: Celery, run: Run) -> None:
    members = [app.tasks["e2e.add"].s(i, i).set(countdown=HOUR) for i in range(2)]
    body = chord(members)(app.tasks["e2e.total"].s())
    results = body.parent.results
    said = run("cancel", *(one.id for one in results), "--yes")
    assert said.out.count("it was scheduled. Its result is REVOKED.") == 2
    assert [one.state for one in results] == ["REVOKED"] * 2
    assert body.state == "FAILURE"


def test_a_result_that_cannot_be_marked_is_told(app: Celery, run: Run) -> None:
    id = send(app, "a", HOUR)
    without = make_app(app.conf.broker_url, "disabled://")
    said = answer(without, "cancel", id, "--yes")
    assert said.code == 0
    assert said.out.endswith("Results are not marked: the app has no result backend.\n")
    id = send(app, "b", HOUR)
    away = make_app(app.conf.broker_url, "redis://127.0.0.1:1/0")
    away.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}
    answer(away, "cancel", id, "--yes").fails(1, "results are not marked REVOKED")


# -- whole queues


def test_a_key_that_another_program_has_written_is_named_and_set_aside(run: Run) -> None:
    key = run.toc.registry.topic("urgent").slot(0).stores[0]
    send(run.app, "other", HOUR)
    run.toc.client.set(key, "something else")
    status = run("status")
    assert status.code == 6 and "celery" in status.out
    assert f"the key {key!r} is no sorted set" in status.err and "celery toc repair" in status.err
    assert run("status", "celery").code == 0
    found = run("check", "--json")
    assert found.code == 5
    assert [(one["queue"], one["kind"], one["id"]) for one in found.json["faults"]] == [
        ("urgent", "other type", key)
    ]
    assert "other type" in run("repair", "--yes").out
    assert run("status").code == run("check").code == 0


def test_what_deletes_the_next_firing_of_a_schedule_says_so(run: Run, server: Server) -> None:
    center = timeout_center(run.app)
    put = lambda *names: [  # noqa: E731
        center.schedules.put(name, "e2e.add", HOUR, queue="urgent", args=(1, 2)) for name in names
    ]
    put("monthly", "weekly", "yearly")
    center.schedules.pause("yearly")
    send(run.app, "ready", queue="urgent")
    among = "The next firing of 'monthly' and 'weekly' was among them; each goes on with the one"
    assert among in run("purge", "urgent", "--yes").out
    for name in ("monthly", "weekly"):
        center.schedules.delete(name)
    put("monthly", "weekly")
    said = run("cancel", "--queue", "urgent", "--yes", "--json").json
    assert (said["cancelled"], said["schedules"]) == (2, ["monthly", "weekly"])
    for name in ("monthly", "weekly"):
        center.schedules.delete(name)
    put("weekly")
    told = "The next firing of 'weekly' was among them"
    assert told in run("cancel", "--queue", "urgent", "--yes").out
    [monthly] = put("monthly")
    assert monthly.next_id is not None
    assert "The next firing of 'monthly' was" in run("cancel", monthly.next_id, "--yes").out
    center.schedules.delete("monthly")
    put("monthly")
    purge = celery(
        *("-A", "tests.support.tasks", "purge", "-f", "-Q", "urgent"),
        E2E_BROKER=server.toc_url,
        E2E_BACKEND=server.url,
    )
    out, err = purge.communicate(timeout=30)
    assert "Purged 1 message" in out, err
    assert "deleted the next firing of 'monthly'" in err
    center.client.close()


def test_a_queue_is_purged_of_what_waits_and_deleted_when_nothing_is_left(run: Run) -> None:
    send(run.app, "dead", queue="urgent")
    bury(run.toc, "urgent")
    send(run.app, "ready", queue="urgent")
    for i in range(2):
        send(run.app, f"{i}", HOUR, queue="urgent")
    run("delete", "urgent", "--yes").fails(1, "1 ready, 2 scheduled, 1 dead", "--force")
    assert run("purge", "urgent", "--yes").out == "Purged 3 messages.\n"
    assert run.toc.counts("urgent") == (0, 0, 0, 1)
    said = run("purge", "urgent", "--json").json
    assert said == {"queue": "urgent", "purged": 0, "schedules": []}
    assert run("purge", "urgent").out == "No messages wait in 'urgent'.\n"
    run("delete", "urgent", "--yes").fails(1, "1 dead")
    said = run("delete", "urgent", "--force", "--yes", "--json")
    assert said.json == {"queue": "urgent", "deleted": 1}
    run("status", "urgent").fails(3, "no queue 'urgent'")
    assert run("delete", "one-slot", "--yes").out == "Deleted 'one-slot'.\n"


def test_a_deleted_queue_leaves_no_binding(live: Live, run: Run) -> None:
    key = f"{live.toc.keys.prefix}{{toc}}:bindings:news"
    with live.app.connection_for_write() as connection:
        channel = connection.default_channel
        live.app.amqp.queues["news"].bind(channel).declare()
        assert live.client.exists(key)
        # By a program that is not this app:
        elsewhere = Exchange("elsewhere", "topic")
        Queue("news", elsewhere, "a.#").bind(channel).declare()
        Queue("urgent", elsewhere, "b").bind(channel).declare()
    assert run("delete", "news", "--yes").code == 0
    assert not live.client.exists(key)
    bound = live.client.zrange(f"{live.toc.keys.prefix}{{toc}}:bindings:elsewhere", 0, -1)
    assert [json.loads(member)[2] for member in bound] == ["urgent"]


def test_status_tells_who_consumes_what_is_paused_and_what_it_takes(live: Live, run: Run) -> None:
    """And a paused queue is left alone by a worker that serves another meanwhile."""
    send(live.app, "waits", HOUR, queue="one-slot")
    [worker] = live.start_workers(1, "-P", "solo", "-Q", "celery,urgent")
    wait_until(lambda: set(live.toc.queues.consumers()) == {"celery", "urgent"})
    said = run("status", "--json").json
    rows = {row["queue"]: row for row in said["topics"]}
    assert {name: row["consumers"] for name, row in rows.items()} == {
        **{"celery": 1, "urgent": 1, "one-slot": 0}
    }
    assert 200 < rows["one-slot"]["memory_bytes"] < 4000
    assert rows["celery"]["memory_bytes"] == 0
    [warning] = [text for text in said["warnings"] if "consumes" in text]
    assert warning == (
        "nobody consumes 'one-slot', in which 1 message waits; start a worker with -Q one-slot"
    )
    run("delete", "urgent", "--yes").fails(1, "is consumed by", "--force")

    assert run("pause", "urgent", "--json").json == {
        **{"queues": ["urgent"], "paused": True, "changed": ["urgent"]}
    }
    assert run("pause", "urgent").out == "'urgent' is already paused.\n"
    [row] = run("status", "urgent", "--json").json["topics"]
    assert row["paused"] is True
    text = run("status").out
    assert re.search(r"^urgent .* paused ", text, re.M), text
    assert "'urgent' is paused" in text
    time.sleep(5.2)  # that the worker knows cannot be seen from outside
    send(live.app, "held", queue="urgent")
    send(live.app, "held", 0.5, queue="urgent")
    send(live.app, "other", 2.5)
    live.journal.wait_for("other", 1)
    assert live.journal.entries("held") == []
    assert live.toc.counts("urgent").ready == 2
    assert run("resume", "urgent").out == "Resumed 'urgent'.\n"
    live.journal.wait_for("held", 2, timeout=6)
    assert run("resume", "urgent").out == "'urgent' is not paused.\n"
    worker.teardown()
    wait_until(lambda: not live.toc.queues.consumers(), 5, live.toc.queues.consumers)


# -- what is told


def test_all_queues_are_listed_together_in_the_order_of_time_with_its_zone(run: Run) -> None:
    queues = ("urgent", "celery", "one-slot")
    ids = [send(run.app, f"{i}", HOUR + 60 * i, queue=queues[i % 3]) for i in range(9)]
    first = run("list", "--limit", 5, "--json").json
    rest = run("list", "--limit", 5, "--after", first["after"], "--json").json
    assert [message["id"] for message in first["messages"] + rest["messages"]] == ids
    elsewhere = make_app(run.app.conf.broker_url, "disabled://", timezone="Asia/Kolkata")
    text = answer(elsewhere, "list").out
    assert len(re.findall(r" \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+05:30 ", text)) == 9
    assert "+05:30 (in " in answer(elsewhere, "show", ids[0]).out


def test_a_queue_is_chosen_by_either_name_of_the_option(app: Celery, run: Run) -> None:
    id = send(app, "a", HOUR, queue="urgent")
    for words in (("--queue", "urgent"), ("-Q", "urgent")):
        assert [one["id"] for one in run("list", *words, "--json").json["messages"]] == [id]
    assert run("list", "--state", "in flight").code == run("list", "--state", "in_flight").code == 0
    assert run("list", "--topic", "urgent").code == 2


def test_the_version_is_told(run: Run) -> None:
    assert run("--version").out == f"celery-toc {celery_toc.__version__}\n"


class _OldServer(socketserver.StreamRequestHandler):
    """A Redis 5."""

    def handle(self) -> None:
        info = b"# Server\r\nredis_version:5.0.14\r\nredis_mode:standalone\r\n"
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2].lower())
            reply = b"+OK\r\n"
            if words[0] == b"info":
                reply = b"$%d\r\n%s\r\n" % (len(info), info)
            elif words[0] == b"hello":
                reply = b"-ERR unknown command `HELLO`\r\n"
            self.wfile.write(reply)


@each("words", [("status",), ("list",), ("top", "--count", "1"), ("purge", "x")])
def test_a_server_that_is_too_old_is_an_error(words: tuple[str, ...]) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _OldServer) as old:
        old.daemon_threads = True
        threading.Thread(target=old.serve_forever, daemon=True).start()
        where = f"127.0.0.1:{old.server_address[1]}"
        said = answer(make_app(f"toc+redis://{where}/0", "disabled://"), *words)
        old.shutdown()
    said.fails(1, f"{where} runs Redis 5.0.14; 6.2 is the oldest that will do")
    assert said.out == ""


def test_whoever_names_a_broker_is_not_asked_for_an_app() -> None:
    said = {
        broker: celery("-b", broker, "toc", "status")
        for broker in ("redis://127.0.0.1:1/0", "memory://", "toc+redis://127.0.0.1:1/0")
    }
    for broker, process in said.items():
        out, err = process.communicate(timeout=60)
        assert (out, process.returncode) == ("", 1 if broker.startswith("toc") else 2)
        assert err.count("\n") == 1
        assert "app" not in err
        assert broker.partition("//")[2] in err


def test_questions_come_after_checks_and_carry_the_count(
    run: Run, environment: dict[str, str]
) -> None:
    for i in range(2):
        send(run.app, f"later-{i}", HOUR, task_id=f"later-{i}")
    send(run.app, "due", queue="urgent")
    bury(run.toc, "urgent")
    words = ("-A", "tests.support.tasks", "toc")

    def asked(*command: str) -> tuple[int, str]:
        code, shown = in_a_terminal("n\n", *words, *command, **environment)
        return code, re.sub(r"\x1b\[[\d;]*m", "", shown)

    code, shown = asked("cancel", "later-0", "nobody", "later-1")
    assert code == 1
    assert "there is no message 'nobody'" in shown.partition("[y/N]")[0]
    assert "Delete 2 messages? [y/N]" in shown
    code, shown = asked("cancel", "nobody")
    assert (code, "[y/N]" in shown) == (3, False)
    code, shown = asked("cancel", "--queue", "celery", "--task", "e2e.note")
    assert "Cancel 2 messages of e2e.note in 'celery'? [y/N]" in shown
    assert "[y/N]: Cancelled; nothing was changed." in shown  # which is no error
    code, shown = asked("reshard", "celery", "--slots", "5")
    assert (code, "[y/N]" in shown) == (2, False)
    assert "--slots must be a power of two from 1 to 512, not 5" in shown
    code, shown = asked("dead", "requeue", "--all")
    assert "Requeue 1 dead message? [y/N]" in shown
    code, shown = asked("dead", "purge", "--queue", "celery")
    assert (code, "[y/N]" in shown, "No messages match." in shown) == (0, False, True)
    code, shown = asked("purge", "celery")
    assert "Delete 2 messages in 'celery' (0 ready, 2 scheduled)? [y/N]" in shown
    code, shown = asked("delete", "urgent", "--force")
    assert "Delete 'urgent', with 1 message (1 dead)? [y/N]" in shown
    code, shown = asked("run", "--until", "2h")
    assert re.search(r"Run 2 messages due before \S+ now\? \[y/N\]", shown)
    assert run.toc.counts("celery").scheduled == 2


def test_a_narrow_terminal_tells_what_it_has_no_room_for(
    app: Celery, environment: dict[str, str]
) -> None:
    words = ("-A", "tests.support.tasks", "toc", "list")
    send(app, "later", HOUR)
    _, wide = in_a_terminal("", *words, COLUMNS="160", **environment)
    assert "No room" not in wide
    assert "Times are in" in wide
    _, narrow = in_a_terminal("", *words, COLUMNS="80", **environment)
    assert "No room for queue and time." in narrow
    assert "Times are in" not in narrow


def test_where_there_are_no_queues_status_says_where_they_come_from(live: Live) -> None:
    live.client.flushall()
    said = answer(live.app, "status")
    assert "There are no queues yet: a worker declares its own when it starts." in said.out
    assert "SCHEDULED" not in said.out
    assert answer(live.app, "status", "--json").json["topics"] == []
    answer(live.app, "status", "mail").fails(3, "there is no queue 'mail'")


# -- top


class Terminal:
    """A command in a terminal of some size; what is on the screen is read as it comes."""

    def __init__(self, *words: str, columns: int = 80, lines: int = 24, **environment: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", **environment}
        for name in ("COLUMNS", "LINES"):
            env.pop(name, None)
        self.process = nursery.Popen(
            [CELERY, *words],
            cwd=ROOT,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        self._slave = slave
        self.raw = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    @property
    def modes(self) -> Any:
        """How the terminal is set."""
        return termios.tcgetattr(self._slave)

    def frame(self) -> str:
        """The last whole frame."""
        frames = self.raw.split("\x1b[H")
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", frames[-2]) if len(frames) > 2 else ""

    def wait_for(self, *words: str, seconds: float = 30) -> str:
        """The next frame that has these words."""
        deadline = time.monotonic() + seconds
        self.raw = ""
        while not all(word in self.frame() for word in words):
            assert time.monotonic() < deadline, self.raw
            if select.select([self._master], [], [], 0.1)[0]:
                self.raw += os.read(self._master, 65536).decode()
        return self.frame()

    def end(self, seconds: float = 15) -> int:
        """Wait for the command's end; what it writes meanwhile is read."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            if select.select([self._master], [], [], 0.05)[0]:
                self.raw += os.read(self._master, 65536).decode()
        while select.select([self._master], [], [], 0.05)[0]:
            self.raw += os.read(self._master, 65536).decode()
        return self.process.returncode

    def close(self) -> None:
        os.close(self._slave)
        os.close(self._master)


def test_top_fits_a_terminal_of_80_columns_shows_an_outage_and_ends_with_q(
    tmp_path: Any, log_url: str
) -> None:
    server = Server(tmp_path, "--appendonly", "yes").start()
    try:
        center = kombu_toc.center_for(server.toc_url)
        name = "a-queue-with-a-long-name-that-is-seen-in-full"
        for topic, number in (("mail", 12), (name, 3)):
            for i in range(number):
                center.put(topic, f"{i}", b"", delay=30 + i)
        environment = {"E2E_BROKER": server.toc_url, "E2E_BACKEND": "", "E2E_LOG": log_url}
        words = ("-A", "tests.support.tasks", "toc", "top", "--interval", "200ms", "--span", "1m")
        terminal = Terminal(*words, **environment)
        before = terminal.modes[3]
        frame = terminal.wait_for("mail", "coming due")
        lines = frame.splitlines()
        assert max(map(len, lines)) <= 80
        assert len(lines) <= 24
        first = [line.split(" ")[0] for line in lines]
        assert name in "".join(first)
        assert re.search(r"^mail +12 ", frame, re.M), frame
        server.kill()
        terminal.wait_for("Redis has been away for", "mail")
        server.start()
        deadline = time.monotonic() + 20
        while "away" in (frame := terminal.wait_for("mail")):
            assert time.monotonic() < deadline
        assert re.search(r"^mail +12 ", frame, re.M), frame
        terminal.type("q")
        assert terminal.end() == 0
        assert terminal.raw.rstrip().endswith("\x1b[?1049l\x1b[?25h")
        assert terminal.modes[3] == before
        terminal.close()
    finally:
        server.stop()


def test_top_without_a_terminal_goes_on_after_an_outage(tmp_path: Any, log_url: str) -> None:
    server = Server(tmp_path, "--appendonly", "yes").start()
    try:
        kombu_toc.center_for(server.toc_url).put("mail", "x", b"", delay=HOUR)
        words = ("-A", "tests.support.tasks", "toc", "top", "--interval", "100ms")
        process = celery(*words, E2E_BROKER=server.toc_url, E2E_BACKEND="", E2E_LOG=log_url)
        assert process.stdout.readline().split()[:2] == ["TIME", "QUEUE"]
        server.kill()
        assert process.stderr.readline().startswith("Redis has been away for")
        server.start()
        assert process.stderr.readline() == "Redis is back.\n"
        assert process.stdout.readline().split()[1] == "mail"
        process.terminate()
        process.communicate(timeout=30)
    finally:
        server.stop()
