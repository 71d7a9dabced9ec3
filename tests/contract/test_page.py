"""The page over HTTP, without a browser: its views, forms, escaping, mounting."""

from __future__ import annotations

import asyncio
import re
import time
from html import unescape
from typing import Any
from urllib.parse import urlencode

import pytest
from celery import Celery

from celery_toc.web import mask_of
from kombu_toc import FailureBounds, TimeoutCenter
from kombu_toc.center.failures import FailureWriter
from kombu_toc.notify.targets import stop_target

from ..meta.test_readme import named
from ..support.cases import each
from ..support.http_server import HttpServer, mounted
from ..support.inspection import minutes_pass, put_some
from ..support.page_visitor import FORM, Visitor, audit, wait_for
from ..support.servers import Server
from ..support.waiting import wait_until
from .test_failures import failure

VIEWS = ("", "queue?queue=mail", "failures", "dead", "limits", "limits?queue=mail", "audit")


@pytest.mark.cluster
def test_every_view_is_a_page_of_its_own_that_loads_nothing_from_elsewhere(local: Visitor) -> None:
    local.center.put("mail", "order-7", b'{"a": 1}', delay=3600)
    for view in (*VIEWS, "message?queue=mail&id=order-7"):
        reply = local.get(view)
        assert reply.status == 200, view
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        text = reply.body.decode()
        assert not re.search(r"<script(?! src=\"page\.js\?v=\w+\" defer></script>)", text)
        assert not re.search(r"\s(style|on\w+)=", text)
        assert not re.search(r"(https?:)?//", re.sub(r"toc\+redis://\S+", "", text)), view
        assert text.count("<h1>") == 1 and 'lang="en"' in text
        for link in re.findall(r'(?:href|src|action)="([^"]*)"', text):
            assert not link.startswith(("/", "http")), link
    for name in ("page.css", "page.js", "icon.svg"):
        kept = local.get(name)
        assert (kept.status, kept.headers["cache-control"]) == (200, "no-cache")
        [version] = re.findall(rf"{name}\?v=(\w+)", local.get("").body.decode())
        assert "immutable" in local.get(f"{name}?v={version}").headers["cache-control"]
        assert b"http://" not in kept.body.replace(b"http://www.w3.org/2000/svg", b"")


def test_the_root_leads_to_the_page(page_server: HttpServer) -> None:
    for path in ("/", "/page"):
        reply = page_server.get(path)
        assert (reply.status, reply.headers["location"]) == (303, "page/")
    assert page_server.get("/page/nothing").status == 404
    assert "/page/" not in page_server.get("/openapi.json").body.decode()


NASTY = "a/../<b>\"'&?#%2F;= \n\u202e\u0000é\U0001f600"


@pytest.mark.cluster
def test_whatever_names_there_are_they_are_shown_as_text_and_can_be_acted_on(
    local: Visitor, center: TimeoutCenter
) -> None:
    queue, id = f"q{NASTY}", f"i{NASTY}"
    center.put(queue, id, f"<img src=x onerror=alert(1)>{NASTY}".encode(), delay=3600)
    center.put(queue, "other", b"{}", delay=3600)
    for view in (
        "",
        f"queue?{urlencode({'queue': queue})}",
        f"message?{urlencode({'queue': queue, 'id': id})}",
        f"queue?{urlencode({'queue': queue, 'text': '<b>', 'task': chr(34)})}",
        f"limits?{urlencode({'queue': queue})}",
    ):
        reply = local.get(view)
        assert reply.status == 200, (view, reply)
        text = reply.body.decode()
        assert "<img" not in text and '<b>"' not in text and "\u202e" not in text
    shown = local.get(f"queue?{urlencode({'queue': queue})}").body.decode()
    [link] = [one for one in re.findall(r'href="(message\?[^"]*)"', shown) if "other" not in one]
    assert local.get(unescape(link)).status == 200
    done = local.post("do", queue=queue, id=id, act="cancel", sure="1")
    assert local.follow(done).status == 200
    assert [one.id for one in center.scan(queue).messages] == ["other"]
    assert audit(center)[-1][1:3] == ["cancel", queue]
    assert local.get("audit").status == 200
    center.queues.delete(queue)


@each("id", ["two\nlines", "two\r\nlines", "\u05e9\u05dc\u05d5\u05dd\u200f", "a\0b", "a*", "%0A"])
def test_a_form_sends_back_just_what_the_page_has_put_into_it(local: Visitor, id: str) -> None:
    queue = f"q {id}"
    put_some(local.center, queue, (id, f"{id}!"), body=b"x", delay=3600)
    shown = local.get(f"queue?{urlencode({'queue': queue})}")
    labels = re.findall(r'aria-label="(choose [^"]*)"', shown.body.decode())
    [label] = [unescape(one) for one in labels if not one.endswith("!")]
    asked = local.send(shown, "Cancel", label)
    assert asked.status == 200
    done = local.follow(local.send(asked, "Cancel 1 message"))
    assert "1 message cancelled." in unescape(done.body.decode())
    assert [one.id for one in local.center.scan(queue).messages] == [f"{id}!"]
    # What is looked for goes through a form, too.
    found = local.send(local.get(f"queue?{urlencode({'queue': queue})}"), "Show")
    assert found.status == 200
    [row] = re.findall(r'href="(message[?][^"]*)"', found.body.decode())
    asked = local.send(local.get(unescape(row)), "Cancel")
    local.follow(local.send(asked, "Cancel 1 message"))
    assert local.center.scan(queue).messages == []
    assert local.send(local.get(f"limits?{urlencode({'queue': queue})}"), "Change").status == 303
    local.center.queues.delete(queue)


def test_a_form_with_a_field_that_nothing_can_decode_is_refused(local: Visitor) -> None:
    assert local.get("queue?queue*=%25ff").status == 400
    assert local.post("do", **{"queue*": "%ff"}).status == 400


def test_a_form_counts_only_with_what_the_page_has_put_into_it(local: Visitor) -> None:
    local.center.put("mail", "order-7", b"x", delay=3600)
    asked = {"queue": "mail", "id": "order-7", "act": "cancel", "sure": "1"}
    stranger = Visitor(local.server)
    for visitor, proof in (
        (local, ""),
        (local, "0" * 64),
        (local, "é"),
        (stranger, local.proof),  # without its cookie
    ):
        assert visitor.post("do", proof, **asked).status == 403
    stranger.get("")
    assert stranger.post("do", local.proof, **asked).status == 403
    other_site = Visitor(local.server, **{"sec-fetch-site": "cross-site"})
    other_site.cookies = dict(local.cookies)
    assert other_site.post("do", local.proof, **asked).status == 403
    elsewhere = {**FORM, "origin": "http://evil.example"}
    kinds = ("text/plain", "multipart/form-data", "application/json")
    for headers, status in ((elsewhere, 403), *(({"content-type": one}, 415) for one in kinds)):
        raw, sent = urlencode({"form": local.proof, **asked}), {**local.sent_along(), **headers}
        reply = local.server.post("/page/do", raw=raw.encode(), headers=sent)
        assert reply.status == status
    assert local.center.get("order-7")
    assert audit(local.center) == []
    assert local.post("do", **asked).status == 303
    assert not local.center.get("order-7")


def test_nothing_is_done_by_looking(local: Visitor, center: TimeoutCenter) -> None:
    center.put("mail", "order-7", b"x", delay=3600)
    query = urlencode({"queue": "mail", "id": "order-7", "act": "cancel", "sure": "1"})
    for view in ("do", "all", "pause", "leave"):
        assert local.get(f"{view}?{query}").status == 405
    for view in ("job?do=go&id=x", f"limits?{query}&limit.rate=1", f"schedules?{query}"):
        local.get(view)
    assert center.get("order-7") and center.queues.paused() == set()
    assert audit(center) == []


def test_a_target_that_is_stopped_is_seen_where_its_queue_is(local: Visitor) -> None:
    url = "https://shop.example.com/hook"
    local.center.queues.alter("mail", target=url)
    local.center.put("mail", "order-7", b"x")
    assert "target stopped" not in wait_for(local, "", "mail")
    assert b"target stopped" not in local.get("queue?queue=mail").body
    assert stop_target(local.center, "mail", url, "410 Gone: <b>moved</b>")
    wait_for(local, "", "target stopped")
    said = local.get("queue?queue=mail").body.decode()
    assert "target stopped" in said and "410 Gone: &lt;b&gt;moved" in said
    local.center.queues.alter("mail", target=url)
    assert b"target stopped" not in local.get("queue?queue=mail").body


@pytest.mark.cluster
def test_failed_tasks_are_grouped_retried_once_and_forgotten(
    local: Visitor, page_server: HttpServer, center: TimeoutCenter
) -> None:
    center.queues.declare("mail")
    nasty = "<img src=x onerror=alert(1)>"
    for number in range(3):
        one = failure(f"t{number}", exception="KeyError", error=f"KeyError: {nasty}\nTraceback")
        assert center.failures.keep([one, failure(f"u{number}")], FailureBounds()) == [True, True]
    links: list[str] = []

    def looked() -> bool:
        links[:] = re.findall(r'href="(failures\?[^"]*)"', local.get("failures").body.decode())
        return len(links) == 2

    wait_until(looked)  # all viewers of a second share a look
    [link] = [unescape(one) for one in links if "KeyError" in one]
    group = local.get(link)
    text = group.body.decode()
    assert "<img" not in text
    assert "&lt;img" in text
    assert "choose u1" not in text
    detail = local.get("message?queue=mail&id=t1")
    assert detail.status == 200
    assert "Traceback" in detail.body.decode() and "<img" not in detail.body.decode()
    said = local.follow(local.send(group, "Retry", "choose t1")).body.decode()
    assert "1 task retried." in said
    twice = local.follow(local.send(group, "Retry", "choose t1")).body.decode()
    assert "0 tasks retried." in twice
    assert [one.id for one in center.scan("mail").messages] == ["t1"]
    asked = local.send(detail, "Delete")
    assert "cannot be retried" in asked.body.decode()
    asked = local.send(local.get("message?queue=mail&id=t0"), "Delete")
    assert "1 task deleted." in local.follow(local.send(asked, "Delete")).body.decode()
    job = local.send(local.get("failures"), "Retry all").headers["location"]  # the larger group
    wait_for(local, job, "Done: 3 tasks retried.")
    shown = local.get("jobs").body.decode()
    assert "Retry failed tasks of shop.pay in mail" in shown and job.replace("&", "&amp;") in shown
    assert [entry[1] for entry in audit(center)[-2:]] == ["retry all"] * 2

    path = "/v1/queues/mail/failures"
    [listed] = page_server.get(path).json["failures"]
    assert (listed["id"], listed["exception"], listed["retryable"]) == ("t2", "KeyError", True)
    assert page_server.get(f"{path}/t2").json == listed
    assert page_server.get(f"{path}/t3").status == 404
    assert page_server.get(f"{path}?after=x").status == 422
    reply = page_server.ask("POST", f"{path}:retry", {"ids": ["t2", "t9"]})
    assert (reply.status, reply.json["retried"]) == (200, 1)
    assert center.failures.keep([failure("v", message=b"")], FailureBounds()) == [True]
    # The mask of this server knows nothing of arguments that were not kept.
    assert "ValueError: ••••" in local.get("message?queue=mail&id=v").body.decode()
    assert page_server.ask("POST", f"{path}:forget", {"limit": 5}).json == {"deleted": 1}


@pytest.mark.cluster
def test_one_box_finds_ids_tasks_and_queues_and_an_id_is_headed_by_its_task(local: Visitor) -> None:
    local.center.queues.declare("mailings")
    local.center.put("mail", "order-7", failure("order-7").message, delay=3600)
    assert local.center.failures.keep([failure("t1", "sms")], FailureBounds()) == [True]
    for view in VIEWS:
        assert 'action="search"' in local.get(view).body.decode(), view
    for text in ("order-7", "t1"):
        shown = local.follow(local.get(f"search?q={text}")).body.decode()
        assert "<h1>shop.pay</h1>" in shown and text in shown
    many = local.get("search?q=mail").body.decode()
    assert re.findall(r'href="(queue\?[^"]*)"', many) == [
        "queue?queue=mail",
        "queue?queue=mailings",
    ]

    def tasks() -> bool:
        shown = local.get("search?q=shop.pay").body.decode()
        return "failures?queue=sms" in shown and "queue?queue=mail&amp;task=shop.pay" in shown

    wait_until(tasks)
    assert "Nothing that you may see" in local.get("search?q=%3Cb%3Enobody").body.decode()
    unknown = local.get("message?queue=mail&id=nobody")
    assert unknown.status == 404
    assert "none knows it: mail, failures." in unknown.body.decode()


def test_what_cannot_be_taken_back_is_asked_for(local: Visitor, center: TimeoutCenter) -> None:
    center.put("mail", "order-7", b"x", delay=3600)
    reply = local.post("do", queue="mail", id="order-7", act="cancel")
    assert reply.status == 200 and b"This cannot be taken back" in reply.body
    assert center.get("order-7")
    assert audit(center) == []


@each(
    "view, fields, status, text",
    [
        ("do", {"queue": "mail", "act": "cancel", "sure": "1"}, 422, "choose 1 to 1,000"),
        ("do", {"queue": "mail", "id": "x", "act": "explode"}, 422, "act: it must be one of"),
        ("do", {"queue": "none", "id": "x", "act": "cancel"}, 404, "there is no queue"),
        ("do", {"queue": "mail", "id": "x", "act": "reschedule"}, 422, "say the new time"),
        ("do", {"queue": "mail", "id": "x", "act": "cancel"}, 404, "these messages are gone"),
        ("all", {"queue": "mail", "act": "cancel", "state": "dead"}, 409, "can be cancelled"),
        ("all", {"queue": "mail", "act": "purge", "since": "x"}, 422, "is not a time"),
        ("pause", {"queue": "mail", "act": "stop"}, 422, "pause or resume"),
        ("job", {"id": "nothing", "do": "go"}, 404, "there is no such job"),
        ("limits", {"queue": "mail", "limit.retries": "99"}, 422, "retries"),
        ("schedules", {"name": "x", "act": "run"}, 404, "celery -A shop toc web"),
    ],
)
def test_a_bad_form_says_what_is_wrong_and_does_nothing(
    local: Visitor, center: TimeoutCenter, view: str, fields: Any, status: int, text: str
) -> None:
    center.put("mail", "order-7", b"x", delay=3600)
    reply = local.post(view, **fields)
    assert reply.status == status, reply
    assert text in unescape(reply.body.decode())
    assert center.get("order-7")
    assert audit(center) == []


@each(
    "view, status",
    [
        ("?span=year", 422),
        ("queue", 404),
        ("queue?queue=none", 404),
        ("queue?queue=mail&state=lost", 422),
        ("queue?queue=mail&after=nonsense", 422),
        ("message?queue=mail&id=none", 404),
        ("job?id=none", 404),
        ("audit?before=x", 422),
        ("audit?before=1-2-3", 422),
        ("audit?before=9-9", 200),
        ("library", 404),
        ("schedules", 404),
    ],
)
def test_a_bad_address_is_a_page_that_says_so(local: Visitor, view: str, status: int) -> None:
    reply = local.get(view)
    assert reply.status == status, reply
    assert reply.headers["content-type"].startswith("text/html")
    assert b"<nav>" in reply.body


@pytest.mark.cluster
def test_any_of_very_many_queues_is_opened_by_its_name(local: Visitor) -> None:
    assert 'action="queue"' not in local.get("").body.decode()
    for n in range(303):
        local.center.queues.declare(f"q-{n}")
    shown = wait_for(local, "", "queues with less to do")
    assert re.search(r'<form method="get" action="queue" class="row">.*name="queue"', shown)
    assert local.get("queue?queue=q-302").status == 200
    shown = wait_for(local, "limits", "Queues without limits")
    assert re.search(r'<form method="get" action="limits" class="row">.*name="queue"', shown)


def test_without_the_script_what_is_typed_is_not_lost(local: Visitor) -> None:
    local.center.put("mail", "order-7", b"x", delay=3600)
    refresh = '<noscript><meta http-equiv="refresh"'
    for view in ("dead", "audit", "limits"):
        assert refresh in local.get(view).body.decode(), view
    for view in ("queue?queue=mail", "message?queue=mail&id=order-7", "limits?queue=mail"):
        shown = local.get(view).body.decode()
        assert refresh not in shown and 'data-every="' in shown, view


def test_it_is_mounted_in_another_application_under_a_prefix(
    single_server: Server, tmp_path: Any
) -> None:
    with single_server.client() as client:
        client.flushall()
        center = TimeoutCenter(client)
        center.put("mail", "order-7", b"x", delay=3600)
        with mounted(tmp_path, single_server.toc_url, "/shop/toc") as made:
            reply = made.get("/shop/toc/")
            assert (reply.status, reply.headers["location"]) == (303, "page/")
            visitor = Visitor(made, "/shop/toc/page")
            shown = visitor.get("queue?queue=mail")
            assert shown.status == 200 and b"order-7" in shown.body
            done = visitor.post("do", queue="mail", id="order-7", act="cancel", sure="1")
            assert done.headers["location"] == "queue?queue=mail"
        assert not center.get("order-7")


# -- the examples of docs/page.md


def test_the_example_of_a_mask_hides_what_it_names(single_server: Server) -> None:
    app = Celery("shop", broker=single_server.toc_url, set_as_current=False)
    exec(named("docs/page.md", "app.conf.toc_web_mask"), {"app": app})
    mask = mask_of(app, ("iban",))
    assert [name for name in ("Password", "card_number", "iban", "order") if mask.hides(name)] == [
        "Password",
        "card_number",
        "iban",
    ]


def test_the_example_of_mounting_has_the_page_below_its_prefix(single_server: Server) -> None:
    app = Celery("shop", broker=single_server.toc_url, set_as_current=False)
    names: dict[str, Any] = {"app": app}
    exec(named("docs/page.md", "from starlette.routing import Mount"), names)

    async def get(path: str) -> int:
        statuses: list[int] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        scope = {
            **{"type": "http", "method": "GET", "path": path, "raw_path": path.encode()},
            **{"query_string": b"", "headers": [(b"host", b"localhost")], "root_path": ""},
            **{"client": ("127.0.0.1", 1), "scheme": "http", "http_version": "1.1"},
        }
        await names["main"](scope, receive, send)
        return statuses[0]

    assert asyncio.run(get("/toc/page/page.css")) == 200
    assert asyncio.run(get("/toc/healthz")) == 200


@pytest.mark.cluster
def test_the_last_hour_is_drawn_and_told_as_a_table(local: Visitor, center: TimeoutCenter) -> None:
    center.queues.declare("hourly")
    center.put_many("hourly", [(f"m{n}", b"{}") for n in range(3)])
    assert len(center.pop("hourly", 10).messages) == 3
    writer = FailureWriter(center.failures, FailureBounds())
    writer.note(failure("t", "hourly"))
    writer.flush(30)
    center.metrics.send(center.runner)
    # As if it were five minutes later: of the present minute nothing is drawn.
    then = minutes_pass(center, "hourly", 5)
    shown = local.get("queue?queue=hourly").body.decode()
    assert "3 messages delivered" in shown and "1 task failed" in shown
    at = time.strftime("%H:%M", time.gmtime(then * 60))
    assert f"<title>{at}: 3 messages</title>" in shown
    assert f"<title>{at}: 1 task</title>" in shown
    assert re.search(rf'data-label="Minute \(UTC\)">[-\d]+ {at}</td>', shown)
    assert shown.count('class="bar bad"') == 1

    def drawn() -> bool:
        text = local.get("").body.decode()
        return "1 task failed" in text and 'href="failures?queue=hourly" class="bad">1<' in text

    wait_until(drawn, 60)
