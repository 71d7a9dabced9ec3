"""The page in a real browser: every act, as a person does it.

It needs the extra ``test-flower``, Chromium and its driver, as the tests of Flower do. With
``TOC_SCREENS=docs/screens`` these tests make the pictures of docs/page.md.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import pools

import celery_toc
from celery_toc import timeout_center
from kombu_toc import FailureBounds, center_for, pack
from kombu_toc.center.failures import FailureWriter
from kombu_toc.http import new_token

from ..contract.test_failures import failure
from ..support import nursery
from ..support.browser import Browser, require_browser
from ..support.http_server import HttpServer
from ..support.inspection import minutes_pass, put_some
from ..support.library import close_libraries, create_tables
from ..support.nodes import ROOT
from ..support.servers import Server

pytestmark = pytest.mark.timeout(150)

HOUR = 3600

APP = """
from celery import Celery

app = Celery(
    "pageshop", broker={broker!r}, backend={backend!r}, include=["pagetasks"], set_as_current=False
)
app.conf.task_routes = {{"shop.mail.*": {{"queue": "mail"}}}}
app.conf.toc_web_mask = ["card", "*token*"]
app.conf.timezone = "UTC"
"""

#: Is imported by what imports the modules of tasks, as a worker does.
TASKS = """
from pageshop import app


@app.task(name="shop.mail.remind", shared=False)
def remind(order, card="", **more):
    pass


@app.task(name="shop.cancel_unpaid", shared=False)
def cancel_unpaid(order):
    pass
"""


@pytest.fixture(scope="module", autouse=True)
def needs() -> None:
    require_browser()


@pytest.fixture(scope="module")
def browser(needs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of these tests' own: the page shows all that is in one."""
    made = Server(tmp_path_factory.mktemp("server")).start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def shared(own_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page of an app, and the app."""
    folder = tmp_path_factory.mktemp("app")
    text = APP.format(broker=own_server.toc_url, backend=own_server.url)
    (folder / "pageshop.py").write_text(textwrap.dedent(text))
    (folder / "pagetasks.py").write_text(TASKS)
    with HttpServer(
        own_server.toc_url,
        command=("-m", "celery", "-A", "pageshop", "toc", "web"),
        environment=nursery.importing(folder),
    ) as made:
        sys.path.insert(0, str(folder))
        import pageshop

        pageshop.app.loader.import_default_modules()
        yield made, pageshop.app
        sys.path.remove(str(folder))
        pools.reset()


@pytest.fixture
def page(shared: Any, browser: Browser) -> str:
    """The address of the page, whose queues are empty."""
    made, app = shared
    center = timeout_center(app)
    for queue in center.queues.names():
        center.queues.purge(queue)
        center.dead.purge(queue)
        center.ack(center.pop(queue, 1000).messages)
        center.queues.resume(queue)
    for schedule in center.schedules.each():
        center.schedules.delete(schedule.name)
    browser.complaints()
    return f"{made.url}/page/"


@pytest.fixture
def app(shared: Any) -> Celery:
    found: Celery = shared[1]
    return found


@pytest.fixture
def center(app: Celery, page: str) -> celery_toc.TaskCenter:
    return timeout_center(app)


@pytest.fixture(autouse=True)
def the_browser_complains_of_nothing(browser: Browser) -> Iterator[None]:
    """No error of the script, and nothing that the policy forbids."""
    yield
    policy = [
        one for one in browser.complaints() if "Content Security" in one or "TypeError" in one
    ]
    assert policy == []


def remind(app: Celery, order: int, countdown: float = HOUR, **more: Any) -> str:
    sent = app.tasks["shop.mail.remind"].apply_async((order,), more, countdown=countdown)
    found: str = sent.id
    return found


def entries(browser: Browser, page: str) -> list[list[str]]:
    """The audit log: who, what, queue, number of each entry, the latest first."""
    browser.open(f"{page}audit")
    return browser.run(
        "return [...document.querySelectorAll('#audit tbody tr')]"
        ".map(row => [...row.cells].slice(1, 5).map(cell => cell.innerText.trim()))"
    )


def choose(browser: Browser, id: str) -> None:
    browser.click(f"input[name=id][value='{id}']")


def states(center: Any, *ids: str) -> list[str]:
    return [found.state for id in ids for found in center.get(id)]


def test_the_overview_counts_and_draws_what_comes_due(
    browser: Browser, page: str, app: Celery
) -> None:
    for order in range(30):
        remind(app, order, 600 + 90 * order**2)
    remind(app, 99, 0)
    hour = ((30 + 7 * minute % 31, minute % 9 // 8, 1) for minute in range(55))
    an_hour_passes(timeout_center(app).center, "orders", hour)
    row = browser.open(page, then="mail", at="#queues tbody")
    assert "30" in row
    cards = browser.text("#numbers")
    assert "30\nscheduled" in cards and "1\nready" in cards
    assert "30 messages due within the next hour" not in cards
    browser.wait_text("messages due within the next hour", "#coming")
    assert browser.all("#coming rect.bar")
    browser.press("next day", "#coming", then="30 messages due within the next day", at="#coming")
    browser.screenshot("page-overview")


def test_what_changes_is_seen_without_a_reload_by_two_viewers(
    browser: Browser, page: str, app: Celery, tmp_path: Path
) -> None:
    id = remind(app, 7)
    other = Browser(tmp_path / "other")
    try:
        for viewer in (browser, other):
            viewer.open(f"{page}queue?queue=mail", then=id)
            viewer.run("window.stays = true")
        choose(browser, id)
        browser.press("Cancel", "main", then="This cannot be taken back")
        browser.press("Cancel 1 message", then="1 message cancelled.")
        other.wait(lambda: id not in other.text())
        assert other.run("return window.stays")
    finally:
        other.close()


def test_chosen_messages_are_cancelled_and_their_results_are_revoked(
    browser: Browser, page: str, app: Celery, center: Any
) -> None:
    ids = [remind(app, order) for order in range(3)]
    browser.open(f"{page}queue?queue=mail")
    for id in ids[:2]:
        choose(browser, id)
    assert "2 chosen" in browser.text()
    browser.screenshot("page-queue")
    browser.press("Cancel", "main")
    browser.press("Cancel 2 messages", then="2 messages cancelled.")
    assert states(center, *ids) == ["waiting"]
    assert [app.AsyncResult(id).state for id in ids] == ["REVOKED", "REVOKED", "PENDING"]
    assert entries(browser, page)[0] == ["this machine", "cancel", "mail", "2"]


@pytest.mark.parametrize("id", ["two\nlines", "two\r\nlines", "\u05e9\u05dc\u05d5\u05dd\u200f"])
def test_what_a_browser_sends_back_is_what_the_page_has_shown(
    browser: Browser, page: str, center: Any, id: str
) -> None:
    put_some(center, "mail", (id, "other"), body=b"x", delay=HOUR)
    browser.open(f"{page}queue?queue=mail", then="other", at="#messages")
    browser.click("tbody tr:first-child input")
    browser.wait_text("1 chosen")
    browser.press("Cancel", "form[data-chooses]")
    browser.press("Cancel 1 message", then="1 message cancelled.")
    assert [one.id for one in center.scan("mail").messages] == ["other"]
    center.cancel("other")
    center.put("mail", "dead", b"x")
    [taken] = center.pop("mail").messages
    center.reject(taken, requeue=False, reason=id, error=f"ValueError: {id}")
    browser.open(f"{page}dead", then="no task", at="#dead")
    browser.press("Delete", "#dead tbody tr:first-child", then="1 message matches.")
    browser.press("Delete 1", then="Done: 1 message deleted.")
    assert center.counts("mail").dead == 0


def test_chosen_messages_are_moved_and_run(
    browser: Browser, page: str, app: Celery, center: Any
) -> None:
    first, second = remind(app, 1), remind(app, 2)
    browser.open(f"{page}queue?queue=mail")
    choose(browser, first)
    browser.type("form[data-chooses] input[name=at]", "2h")
    browser.press("Reschedule", "form[data-chooses]", then="1 message rescheduled.")
    [found] = center.get(first)
    assert abs(found.time_us / 1e6 - time.time() - 2 * HOUR) < 60
    choose(browser, second)
    browser.press("Run now", "form[data-chooses]", then="1 message made due.")
    browser.wait_text("ready", "#messages")
    [found] = center.get(second)
    assert found.time_us <= time.time() * 1e6
    acts = [entry[1:] for entry in entries(browser, page)[:2]]
    assert acts == [["run", "mail", "1"], ["reschedule", "mail", "1"]]


def test_a_time_that_cannot_be_read_is_told_and_nothing_is_moved(
    browser: Browser, page: str, app: Celery, center: Any
) -> None:
    id = remind(app, 1)
    [before] = center.get(id)
    browser.open(f"{page}queue?queue=mail")
    choose(browser, id)
    browser.type("form[data-chooses] input[name=at]", "soon")
    browser.press("Reschedule", "form[data-chooses]")
    browser.wait_text("'soon' is not a time up to the year 2255")
    assert center.get(id) == [before]


def test_a_message_is_shown_in_full_and_what_is_hidden_is_not(
    browser: Browser, page: str, app: Celery, center: Any
) -> None:
    sent = app.tasks["shop.mail.remind"].apply_async(
        (7, "4111-1111"),
        {"to": "<script>alert(1)</script>", "more": {"api_token": "s3cret-s3cret"}},
        countdown=HOUR,
        headers={**celery_toc.biz("order", 7), "x-key": "anna"},
    )
    shown = browser.open(f"{page}message?queue=mail&id={sent.id}", then="shop.mail.remind")
    assert "scheduled" in shown and "order 7" in shown and "anna" in shown
    assert "7, ••••, to='<script>alert(1)</script>'" in shown
    whole = browser.press("Headers and body", then="properties.")
    assert "api_token" in whole and "<script>alert(1)</script>" in whole
    source = browser.driver.page_source
    assert "4111-1111" not in source and "s3cret-s3cret" not in source
    assert "<script>alert" not in source
    # A filter does not find what is hidden either.
    browser.open(f"{page}queue?queue=mail&text=4111")
    assert sent.id not in browser.wait_text("There is no such message")
    browser.open(f"{page}queue?queue=mail&text=SCRIPT", then=sent.id)
    browser.open(f"{page}message?queue=mail&id={sent.id}")
    browser.press("Cancel", "main")
    browser.press("Cancel 1 message", then="is in mail no more")
    assert center.get(sent.id) == []


def test_filters_find_by_task_arguments_business_id_time_and_id(
    browser: Browser, page: str, app: Celery
) -> None:
    soon = remind(app, 1, 60)
    late = remind(app, 222, 2 * HOUR, to="anna@example.com")
    business = app.tasks["shop.cancel_unpaid"].apply_async(
        (3,), countdown=HOUR, queue="mail", headers=celery_toc.biz("order", "b-3")
    )
    browser.open(f"{page}queue?queue=mail", then=soon)
    every = {soon, late, business.id}

    def only(*ids: str) -> None:
        def shown() -> bool:
            text = browser.text("#messages")
            return {id for id in every if id in text} == set(ids)

        browser.wait(shown)

    only(*every)
    for field, text, ids in (
        ("task", "shop.cancel*", (business.id,)),
        ("text", "ANNA@", (late,)),
        ("biz", "b-3", (business.id,)),
        ("until", "30m", (soon,)),
        ("since", "90m", (late,)),
    ):
        browser.type(f".filters input[name={field}]", text)
        browser.press("Show", ".filters")
        only(*ids)
        browser.press("Clear", ".filters")
        only(*every)
    browser.type("header input[name=q]", "cancel_un\ue007")  # a part of a name that is known
    only(business.id)
    browser.press("Clear", ".filters")
    browser.press("ready 0", "#states")
    only()
    browser.type(".filters input[name=id]", late)
    browser.press("Show", ".filters")
    browser.wait(lambda: browser.text("h1") == "shop.mail.remind" and late in browser.text("main"))


def test_all_that_match_are_counted_asked_for_and_cancelled(
    browser: Browser, page: str, app: Celery, center: Any
) -> None:
    for order in range(60):
        remind(app, order, HOUR + order, to="anna" if order % 3 else "ben")
    browser.open(f"{page}queue?queue=mail&text=ben", then="ben", at="#messages")
    browser.press("To all that match")
    browser.press("Cancel all that match", then="20 messages match.")
    assert center.counts("mail").scheduled == 60
    browser.screenshot("page-job")
    browser.press("Cancel 20", then="Done: 20 messages cancelled.")
    assert center.counts("mail").scheduled == 40
    assert not center.scan("mail", where=lambda task: task.kwargs == {"to": "ben"}).messages
    [ends, begins] = entries(browser, page)[:2]
    assert ends == begins == ["this machine", "cancel all", "mail", "20"]


def test_what_is_done_to_all_can_be_stopped_and_what_is_not_confirmed_is_not_done(
    browser: Browser, page: str, app: Celery, center: Any
) -> None:
    body = center.center.get(remind(app, 0))[0].body
    number = 20_000
    center.put_many(
        "mail",
        [{"id": f"many-{place}", "body": body, "delay": HOUR} for place in range(number - 1)],
    )
    browser.open(f"{page}queue?queue=mail&state=scheduled")
    browser.press("To all that match")
    browser.press("Run now all that match", then=f"{number:,} messages match.")
    browser.press("Do not", then="stopped")
    assert center.counts("mail").scheduled == number
    browser.open(f"{page}queue?queue=mail&state=scheduled")
    browser.press("To all that match")
    browser.press("Cancel all that match", then=f"{number:,} messages match.")
    browser.press(f"Cancel {number:,}")
    browser.wait(lambda: "Stop" in browser.text("#job .acts"))
    said = browser.press("Stop", "#job", then="Stopped:", at="#job")
    cancelled = int(said.split("Stopped: ")[1].split(" ")[0].replace(",", ""))
    assert 0 <= cancelled < number
    assert center.counts("mail").scheduled == number - cancelled
    assert entries(browser, page)[0][1:] == ["cancel all", "mail", f"{cancelled:,}"]


def test_all_that_match_are_moved_and_run(
    browser: Browser, page: str, app: Celery, center: Any
) -> None:
    for order in range(700):
        remind(app, order, HOUR + order / 100)
    browser.open(f"{page}queue?queue=mail")
    browser.press("To all that match")
    browser.type("#all input[name=at]", "3h")
    browser.press("Reschedule all that match", "#all", then="700 messages match.")
    browser.press("Reschedule 700", then="Done: 700 messages rescheduled.")
    assert center.queues.coming("mail", [2.9 * HOUR, 3.1 * HOUR]) == [0, 700]
    browser.press("To the queue")
    browser.press("To all that match")
    browser.press("Run now all that match")
    browser.press("Run now 700") if browser.wait_text("700 messages match.") else None
    browser.wait_text("Done: 700 messages made due.")
    assert center.counts("mail").ready == 700


@pytest.fixture
def dead(app: Celery, center: Any) -> list[str]:
    """Five dead letters, of two kinds."""
    ids = [remind(app, order, 0) for order in range(5)]
    taken = {one.id: one for one in center.pop("mail", ids=ids).messages}
    for place, id in enumerate(ids):
        error = "ValueError: mailbox unavailable" if place < 3 else "OSError: no route\nto host"
        center.reject(taken[id], requeue=False, error=f"Traceback:\n{error}")
    return ids


def test_dead_letters_are_grouped_and_a_group_is_requeued_or_deleted(
    browser: Browser, page: str, dead: list[str], center: Any
) -> None:
    browser.open(page)
    browser.wait(lambda: browser.all("#queues td a.bad"))
    shown = browser.open(f"{page}dead", then="mailbox unavailable", at="#dead")
    assert "5 dead" in shown
    rows = browser.run(
        "return [...document.querySelectorAll('#dead tbody tr')]"
        ".map(row => [row.cells[0].innerText.trim(), row.cells[3].innerText.trim()])"
    )
    assert rows == [["3", "ValueError: mailbox unavailable"], ["2", "to host"]]
    browser.screenshot("page-dead")
    browser.press("Requeue", "#dead tbody tr:first-child", then="3 messages match.")
    browser.press("Requeue 3", then="Done: 3 messages requeued.")
    assert states(center, *dead) == ["waiting"] * 3 + ["dead"] * 2
    browser.open(f"{page}dead", then="to host", at="#dead")
    browser.press("Delete", "#dead tbody tr:first-child", then="2 messages match.")
    browser.press("Delete 2", then="Done: 2 messages deleted.")
    assert states(center, *dead) == ["waiting"] * 3
    assert [entry[1:] for entry in entries(browser, page)[:4:2]] == [
        ["purge all", "mail", "2"],
        ["requeue all", "mail", "3"],
    ]


def test_one_dead_letter_is_shown_with_its_error_and_put_back(
    browser: Browser, page: str, dead: list[str], center: Any
) -> None:
    browser.open(f"{page}queue?queue=mail&state=dead", then="mailbox unavailable", at="#messages")
    browser.press(dead[0], "#messages", then="Traceback:")
    browser.press("Requeue", "main", then="1 message requeued.")
    assert states(center, dead[0]) == ["waiting"]


def test_limits_show_what_is_used_and_waits_and_are_changed_in_use(
    browser: Browser, page: str, center: Any
) -> None:
    center.queues.declare("api")
    center.queues.alter("api", concurrency=2, key_order="serial")
    for number in range(5):
        center.put("api", f"call-{number}", b"{}", key="anna" if number < 3 else f"key-{number}")
    taken = center.pop("api", 10).messages
    assert len(taken) == 2
    try:
        row = browser.open(f"{page}limits", then="2 of 2", at="#usage")
        assert "serial" in row
        browser.press("api", "#usage", then="Workers and senders know within five seconds")
        waiting = browser.wait_text("Keys that wait", "#usage")
        assert "anna\tone that runs" in waiting
        browser.type("input[name='limit.concurrency']", "3")
        browser.type("input[name='limit.rate']", "100/s")
        browser.press("Change", "form.limits", then="Changed: ")
        assert center.queues.describe("api").limits["concurrency"].value == 3
        assert center.queues.describe("api").limits["rate"].value == "100/s"
        browser.type("input[name='limit.rate']", "often")
        browser.press("Change", "form.limits", then="must be a rate such as 100/s")
        assert center.queues.describe("api").limits["rate"].value == "100/s"
        browser.open(f"{page}limits?queue=api")
        browser.type("input[name='limit.rate']", "")
        browser.type("input[name='limit.concurrency']", "none")
        browser.press("Change", "form.limits", then="concurrency none")
        assert center.queues.describe("api").limits["concurrency"].value is None
        assert entries(browser, page)[0][1:3] == ["alter", "api"]
    finally:
        center.ack(taken)
        center.queues.delete("api")


def test_a_queue_is_paused_and_resumed(
    browser: Browser, page: str, app: Celery, center: Any
) -> None:
    remind(app, 1)
    browser.open(f"{page}queue?queue=mail")
    browser.press("Pause", then="mail is paused.")
    assert center.queues.paused() == {"mail"}
    browser.open(page, then="paused", at="#queues")
    browser.open(f"{page}queue?queue=mail")
    browser.press("Resume", then="mail is resumed.")
    assert not center.queues.paused()


def test_schedules_are_paused_resumed_skipped_and_run(
    browser: Browser, page: str, app: Celery, center: Any
) -> None:
    schedules = center.schedules
    schedules.put("nightly", "shop.cancel_unpaid", HOUR, args=[7])
    before = schedules.get("nightly").next
    browser.open(f"{page}schedules", then="nightly", at="#schedules")
    browser.press("Pause", "#schedules", then="nightly is paused.")
    assert schedules.get("nightly").state == "paused"
    browser.press("Resume", "#schedules", then="nightly is resumed.")
    browser.press("Skip next", "#schedules", then="nightly will leave out its next firing.")
    assert schedules.get("nightly").next > before
    browser.press("nightly", "#schedules", then="Latest firings")
    browser.press("Run now", "#schedule", then="nightly was sent.")
    assert center.counts("celery").ready == 1
    browser.wait_text("by hand", "#schedule")
    browser.wait_text("left out the next firing", "#schedule")
    browser.type("form input[name=start]", "-200m")
    browser.press("Back-fill", then="nightly: 4 firings of the past were sent.")
    browser.wait_text("sent 4 of the past", "#schedule")
    acts = [entry[1] for entry in entries(browser, page)[:5]]
    assert acts == [
        "backfill schedule",
        "run schedule",
        "skip schedule",
        "resume schedule",
        "pause schedule",
    ]


def test_a_task_is_sent_and_a_schedule_is_put_changed_and_deleted(
    browser: Browser, page: str, app: Celery, center: Any
) -> None:
    browser.open(page)
    browser.press("Send a task", "main")
    browser.type("input[name=task]", "shop.mail.remind")
    browser.type("input[name=eta]", "soon")
    browser.type("textarea[name=args]", "[7]")
    browser.press("Send", "main", then="'soon' is not a time", at="#wrong")
    field = browser.find("input[name=eta]")
    assert field.get_property("value") == "soon"
    assert field == browser.driver.switch_to.active_element
    browser.type("input[name=eta]", "1h30m")
    browser.press("Send", "main", then="shop.mail.remind was sent.")
    assert center.counts("mail").scheduled == 1
    browser.open(f"{page}schedules")
    browser.press("New schedule", "main")
    browser.type("input[name=name]", "nightly")
    browser.type("input[name=task]", "shop.cancel_unpaid")
    browser.type("input[name=when]", "0 3 * * *")
    browser.type("textarea[name=args]", "[7]")
    browser.press("Put", "main", then="nightly is put.")
    browser.press("Edit", "#schedule")
    browser.press("More rules")
    browser.type("input[name=jitter]", "5s")
    browser.press("Change", "main", then="nightly is changed.")
    assert center.schedules.get("nightly").jitter == 5
    browser.press("Delete", "#schedule")
    browser.press("Delete", "main", then="nightly is deleted.")
    assert center.schedules.get("nightly") is None
    acts = [entry[1] for entry in entries(browser, page)[:4]]
    assert acts == ["delete schedule", "put schedule", "put schedule", "send"]


def test_the_keyboard_goes_everywhere(browser: Browser, page: str, app: Celery) -> None:
    ids = [remind(app, order, HOUR + order) for order in range(3)]
    browser.open(f"{page}queue?queue=mail", then=ids[2])
    browser.keys("jj")
    browser.keys("x")
    assert browser.find(f"input[name=id][value='{ids[1]}']").is_selected()
    browser.keys("\ue007")
    browser.wait(lambda: browser.text("h1") == "shop.mail.remind")
    assert ids[1] in browser.text("main")
    browser.keys("gd")
    browser.wait(lambda: browser.text("h1") == "Dead letters")
    browser.keys("gf")
    browser.wait(lambda: browser.text("h1") == "Failures")
    browser.keys("go")
    browser.wait(lambda: browser.text("h1") == "Overview")
    browser.keys("?")
    browser.wait_text("choose the row", "#help")
    browser.open(f"{page}queue?queue=mail")
    browser.keys("/")
    browser.keys("shop.*")
    field = browser.find(".filters input[name=task]")
    assert field.get_property("value") == "shop.*"


#: Links of the navigation that are not seen as a whole.
BEYOND = """
return [...document.querySelectorAll("nav a")].map(one => [one.innerText,
  one.getBoundingClientRect()]).filter(([, at]) => at.left < 0 || at.right > arguments[0])
  .map(([text]) => text)
"""

#: What can be pressed and is lower than 24 pixels.
SMALL = """
return [...document.querySelectorAll("main a, main button, main input, main select, main summary, "
  + "header a:not(.skip)")].filter(one => one.checkVisibility())
  .map(one => [one.innerText || one.name, one.getBoundingClientRect().height])
  .filter(([, height]) => height > 0 && height < 24)
"""


#: Cells whose text does not fit into them, and tables of which a part has to be pushed into sight.
TIGHT = """
return [...document.querySelectorAll("main td, main .scroll")]
  .filter(one => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1)
  .map(one => one.innerText)
"""

#: Buttons and links that have a line of their group to themselves, below others.
ALONE = """
const found = [];
for (const group of document.querySelectorAll("main form, main .acts, nav, .tabs")) {
  const kinds = "button, a.button, nav a, .tabs a, input:not([type=hidden]), select";
  const parts = [...group.querySelectorAll(kinds)]
    .filter(one => one.checkVisibility() && one.closest("form, .acts, nav, .tabs") === group);
  const lines = new Map();
  for (const one of parts) {
    const line = Math.round(one.getBoundingClientRect().bottom / 4);
    const near = [line, line - 1, line + 1].find(at => lines.has(at)) ?? line;
    lines.set(near, [...(lines.get(near) ?? []), one]);
  }
  const widths = parts.map(one => one.getBoundingClientRect().width);
  for (const line of [...lines.values()].slice(1)) {
    const [one] = line;
    if (line.length === 1 && one.matches("button, a") && !one.matches(".main")
        && one.getBoundingClientRect().width < Math.max(...widths)) found.push(one.innerText);
  }
}
return found;
"""

#: Texts whose contrast is less than WCAG's AA asks for, and edges of fields.
FAINT = """
const read = text => text.match(/[\\d.]+/g).map(Number);
const bright = ([r, g, b]) => [r, g, b].map(one => one / 255)
  .map(one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
  .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
const ratio = (one, other) => {
  const [low, high] = [bright(one), bright(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const behind = one => {
  for (; one; one = one.parentElement) {
    const said = getComputedStyle(one).backgroundColor;  // that of a row under the mouse is mixed
    const color = read(said);
    if (said.startsWith("rgb") && (color.length < 4 || color[3] > 0)) return color;
  }
};
const found = [];
for (const one of document.querySelectorAll("body *")) {
  if (!one.checkVisibility() || one.disabled) continue;
  const style = getComputedStyle(one);
  const says = [...one.childNodes].some(part => part.nodeType === 3 && part.data.trim());
  if (says && !one.closest("svg") && ratio(read(style.color), behind(one)) < 4.5)
    found.push(one.outerHTML);
  if (one.matches(".bar") && ratio(read(style.fill), behind(one.ownerSVGElement)) < 3)
    found.push("a bar");
  if (one.matches("input:not([type=checkbox]), select, textarea")) {
    const hint = getComputedStyle(one, "::placeholder").color;
    if (ratio(read(hint), behind(one)) < 4.5) found.push(`hint of ${one.name}`);
    if (ratio(read(style.borderTopColor), behind(one.parentElement)) < 3)
      found.push(`edge of ${one.name}`);
  }
}
return found;
"""


def an_hour_passes(toc: Any, queue: str, steps: Iterable[tuple[int, int, int]]) -> None:
    """In each step so many messages were delivered and tasks have failed, and minutes have passed
    since."""
    toc.queues.declare(queue, concurrency=1000)
    writer = FailureWriter(toc.failures, FailureBounds())
    for step, (delivered, failed, minutes) in enumerate(steps):
        toc.put_many(queue, [(f"m{n}-{step}", b"{}") for n in range(delivered)])
        toc.ack(toc.pop(queue, delivered).messages)
        for number in range(failed):
            writer.note(failure(f"t{number}", queue, error="ValueError: order 9 has no card " * 9))
        writer.flush(30)
        toc.metrics.send(toc.runner)
        minutes_pass(toc, queue, minutes)


def an_hour_with_failures(browser: Browser, page: str, center: Any, queue: str) -> str:
    """Messages were delivered and tasks have failed within the last hour; the id of a job."""
    toc = center.center
    an_hour_passes(toc, queue, ((20, 4, 20), (15, 3, 15), (5, 1, 5)))
    browser.open(f"{page}failures?queue={queue}&task=shop.pay&exception=ValueError")
    browser.press("Retry all that match", "main", then="4 tasks retried.")
    kept = [failure(f"t{number}", queue) for number in range(2)]
    assert toc.failures.keep(kept, FailureBounds()) == [True, True]
    return str(browser.driver.current_url).partition("id=")[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_usable_at_every_width_in_light_and_dark(
    browser: Browser, page: str, app: Celery, dead: list[str], center: Any, scheme: str
) -> None:
    remind(app, 1, to="a" * 200)
    center.schedules.put("remind-all-the-customers", "shop.mail.remind", HOUR, args=[7])
    queue = f"orders-{scheme}"  # what the server knows of the past, it does not read again
    job = an_hour_with_failures(browser, page, center, queue)
    command = browser.driver.execute_cdp_cmd
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    command("Emulation.setEmulatedMedia", {"features": media})
    views = (
        *("", "queue?queue=mail", "queue?queue=mail&state=dead", "queue?queue=mail&state=all"),
        *("dead", "limits", "limits?queue=mail", "schedules", "schedules?new=1", "send", "audit"),
        *(f"message?queue=mail&id={dead[0]}", "schedules?name=remind-all-the-customers"),
        *("failures", f"failures?queue={queue}&task=shop.pay&exception=ValueError", "jobs"),
        *(
            f"queue?queue={queue}",
            f"limits?queue={queue}",
            f"message?queue={queue}&id=t0",
            f"job?id={job}",
        ),
    )
    try:
        for width in (360, 768, 1280, 1920):
            size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
            command("Emulation.setDeviceMetricsOverride", size)
            for view in views:
                browser.open(page + view)
                browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
                for box in browser.all("#messages input[name=id]")[:1]:
                    browser.run("arguments[0].scrollIntoView({block: 'center'})", box)
                    box.click()
                assert browser.run("return document.documentElement.scrollWidth") <= width, view
                # Nothing has to be pushed aside to be found, and a finger meets what it points at.
                assert browser.run(BEYOND, width) == [], view
                assert width > 800 or browser.run(SMALL) == [], view
                assert browser.run(ALONE) == [], (width, view)
                assert browser.run(TIGHT) == [], (width, view)
                assert browser.run(FAINT) == [], (width, view)
        command("Emulation.setDeviceMetricsOverride", {**size, "width": 360, "mobile": True})
        browser.open(f"{page}queue?queue=mail")
        color = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert color == ("rgb(20, 23, 26)" if scheme == "dark" else "rgb(251, 251, 250)")
        row = browser.find("#messages tbody tr td[data-label=Task]")
        assert row.is_displayed()
        assert browser.find("#messages .badge").rect["width"] < row.rect["width"] / 2
        assert not browser.find(".filters input[name=task]").is_displayed()
        browser.click("label.unfold")
        assert browser.find(".filters input[name=task]").is_displayed()
        assert not browser.find(".sticky").is_displayed()
        browser.click("#messages input[name=id]")
        assert browser.find(".sticky").is_displayed()
    finally:
        command("Emulation.clearDeviceMetricsOverride", {})
        command("Emulation.setEmulatedMedia", {"features": []})


def test_a_broker_that_goes_away_is_told_and_the_page_goes_on_when_it_is_back(
    browser: Browser, page: str, app: Celery, center: Any, own_server: Server
) -> None:
    remind(app, 1)
    browser.open(page, then="mail", at="#queues")
    browser.run("window.stays = true")
    own_server.kill()
    try:
        said = browser.wait_text("No news.", "#trouble")
        assert "broker" in said
        browser.wait_text("old; it is tried again", "#trouble")
        assert "mail" in browser.text("#queues")  # what was known is still shown
    finally:
        own_server.start()
    center.queues.declare("mail")
    remind(app, 2)
    browser.wait(lambda: not browser.text("#trouble"))
    browser.wait_text("mail", "#queues")
    assert browser.run("return window.stays")
    # A view of one queue says so, too, and is there again by itself.
    browser.open(f"{page}queue?queue=mail", then="shop.mail.remind", at="#messages")
    own_server.kill()
    try:
        browser.wait_text("No news.", "#trouble")
        assert "shop.mail.remind" in browser.text("#messages")
    finally:
        own_server.start()
    center.queues.declare("mail")
    browser.wait(lambda: not browser.text("#trouble"))


WORKER_APP = """
import os, time
from pageshop import app as shop


def wait(until):
    while not os.path.exists(until):
        time.sleep(0.05)


shop.task(name="shop.mail.slow", shared=False, acks_late=True)(wait)
shop.task(name="shop.mail.early", shared=False)(wait)
"""


@pytest.fixture
def worker(shared: Any, own_server: Server) -> Iterator[None]:
    """A worker of the app's queues, which runs two tasks at a time."""
    import pageshop

    folder = Path(pageshop.__file__).parent
    (folder / "pageshop_worker.py").write_text(WORKER_APP + "\napp = shop\n")
    words = ("-m", "celery", "-A", "pageshop_worker", "worker", "-P", "threads", "-c", "2")
    words += ("-Q", "celery,mail", "-n", "w@here", "--without-mingle")
    environment = {**os.environ, **nursery.importing(folder)}
    with nursery.running(words, folder / "worker.log", cwd=folder, env=environment):
        yield


def test_the_workers_say_what_they_hold_and_who_has_a_message(
    browser: Browser, page: str, app: Celery, worker: None, tmp_path: Path
) -> None:
    browser.open(page, then="w@here", at="#workers")
    enough = tmp_path / "enough"
    sent = app.send_task("shop.mail.slow", (str(enough),), queue="mail")
    early = app.send_task("shop.mail.early", (str(enough),), queue="mail")
    try:
        browser.wait_text(sent.id, "#workers")
        row = browser.wait_text(early.id, "#workers")
        assert "shop.mail.slow" in row and "celery, mail" in row
        browser.open(f"{page}message?queue=mail&id={sent.id}")
        browser.wait_text("w@here, which runs it", "#holders")
        assert "in flight" in browser.text("main")
        assert "Cancel" not in browser.text("main")
        # One that was acknowledged as it began is in Redis no more, and runs.
        browser.open(f"{page}message?queue=mail&id={early.id}")
        browser.wait_text("w@here, which runs it", "#holders")
    finally:
        enough.touch()
    browser.wait_text("is in mail no more", "#holders")


def test_with_tokens_people_sign_in_and_out(
    browser: Browser, page: str, own_server: Server, app: Celery
) -> None:
    remind(app, 1)
    reader, line = new_token("ben", "read", "mail")
    operator, other_line = new_token("anna", "read,write,operate", "*")
    tokens = {"TOC_HTTP_TOKENS": f"{line};{other_line}"}
    with HttpServer(own_server.toc_url, environment=tokens) as made:
        url = f"{made.url}/page/"
        browser.open(f"{url}dead")
        browser.wait(lambda: browser.text("h1") == "Sign in")
        browser.type("input[name=token]", "nonsense")
        browser.press("Sign in", "main", then="This token is not known here")
        browser.type("input[name=token]", reader)
        browser.press("Sign in", "main")
        browser.wait(lambda: browser.text("h1") == "Overview")
        assert "celery" not in browser.text("#queues tbody")
        browser.press("mail", "#queues", then="shop.mail.remind", at="#messages")
        assert not browser.all("input[name=id][type=checkbox]")
        assert "Pause" not in browser.text("main")
        browser.press("Sign out ben")
        browser.wait(lambda: browser.text("h1") == "Sign in")
        browser.open(url)
        browser.wait(lambda: browser.text("h1") == "Sign in")
        browser.type("input[name=token]", operator)
        browser.press("Sign in", "main", then="mail", at="#queues")
        # A session that ends elsewhere ends here, within seconds and without a click.
        with own_server.client() as client:
            for key in client.scan_iter("*session*"):
                client.delete(key)
        browser.wait(lambda: browser.text("h1") == "Sign in")


def test_the_library_is_searched_by_business_id(
    browser: Browser, own_server: Server, tmp_path: Path
) -> None:
    database = f"sqlite:///{tmp_path / 'library.db'}"
    url = f"{own_server.toc_url}?toc_library={database}"
    create_tables(database)
    center = center_for(url)
    try:
        for order in (7, 8):
            message = {
                "headers": {"task": "shop.remind", **celery_toc.biz("order", order)},
                "properties": {},
                "content-type": "application/json",
                "content-encoding": "utf-8",
                "body": b"[[], {}, {}]",
            }
            center.put("kept", f"order-{order}", pack(message, deflate=False), delay=HOUR)
        center.cancel("order-8", topic="kept")
        with HttpServer(url) as made:
            browser.open(f"{made.url}/page/library", then="order-7", at="#records")
            due = browser.find("#records td[data-label=Due] .when").text
            assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\sin (1 h|\d+ min( \d+ s)?)", due)
            assert browser.run(TIGHT) == []
            browser.type("input[name=biz]", "8")
            browser.press("Find", ".filters")
            browser.wait(lambda: "order-7" not in browser.text("#records tbody"))
            assert "cancelled" in browser.wait_text("order-8", "#records")
            browser.press("order-8", "#records", then="is in kept no more")
            browser.wait_text("cancelled", "main")
            browser.open(f"{made.url}/page/message?queue=kept&id=order-7")
            browser.wait_text("In the task library")
            browser.press("Cancel", "main")
            browser.press("Cancel 1 message", then="1 message cancelled.")
            browser.open(f"{made.url}/page/library?status=cancelled&biz=7")
            browser.wait_text("order-7", "#records")
    finally:
        close_libraries()


def test_a_newcomer_sees_tasks_count_down(browser: Browser) -> None:
    process = subprocess.Popen(
        [sys.executable, "examples/first_run", "--page", "--port", "0", "--first", "60"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"Open (\S+) and see them count down", line):
                break
        else:
            raise AssertionError("".join(said))
        browser.open(found[1], then="300\nscheduled", at="#numbers")
        browser.wait_text("celery@", "#workers")
        browser.press("celery", "#queues", then="first_run.note_lateness", at="#messages")
        first = browser.text("#messages .away")
        browser.wait(lambda: browser.text("#messages .away") != first)
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0, rest


def test_a_newcomer_whose_port_is_taken_is_told_so_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("examples/first_run", "--page", "--port", str(port), "--tasks", "20")
        done = nursery.done(words, code=1, execute=True, environment={"PYTHONPATH": str(ROOT)})
    said = done.stderr.strip().splitlines()
    assert [line for line in said if f"127.0.0.1:{port}: Address already in use" in line] == [
        said[0]
    ], done.stderr
    assert said[1:] == ["--port NUMBER chooses another port."]
