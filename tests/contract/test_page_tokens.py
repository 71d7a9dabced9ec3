"""The page: who may do what, sessions, and what the log says of it."""

from __future__ import annotations

import html
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kombu_toc import TimeoutCenter
from kombu_toc.http import new_token

from ..support.cases import night
from ..support.cluster import Cluster
from ..support.http_server import HttpServer, peak_of
from ..support.page_visitor import Visitor, audit, wait_for
from ..support.servers import Server
from ..support.waiting import wait_until

VIEWS = ("", "queue?queue=mail", "dead", "limits", "limits?queue=mail", "audit")


def test_without_a_session_nothing_is_shown_but_where_to_sign_in(
    guarded_page: HttpServer, center: TimeoutCenter, tokens: Any
) -> None:
    center.queues.declare("mail")
    visitor = Visitor(guarded_page)
    for view in VIEWS:
        reply = visitor.get(view)
        assert reply.status == 401 and b"Sign in" in reply.body
        assert b"mail" not in reply.body
    assert visitor.post("pause", queue="mail", act="pause").status == 401
    assert center.queues.paused() == set()
    for wrong in ("", "nonsense", "é", tokens["anna"][1]):
        reply = visitor.sign_in(wrong)
        assert reply.status == 401 and b"not known here" in reply.body
    assert visitor.get("").status == 401
    # A link elsewhere leads here without the cookie, which a reload has.
    again = visitor.get("", **{"sec-fetch-site": "cross-site"})
    assert again.status == 200 and b'http-equiv="refresh" content="0"' in again.body


@pytest.mark.parametrize(
    "view, how",
    [
        *(("login", "chunks"), ("do", "length")),
        *(night(*other) for other in (("login", "length"), ("do", "chunks"))),
    ],
)
def test_who_has_not_signed_in_has_nothing_large_kept(
    guarded_page: HttpServer, how: str, view: str
) -> None:
    """40 connections send 8 MiB each, and no end."""
    said = {"length": "content-length: 16000000", "chunks": "transfer-encoding: chunked"}[how]
    kind = "content-type: application/x-www-form-urlencoded"
    lines = (f"POST /page/{view} HTTP/1.1", "host: localhost", kind, said, "", "")
    head = "\r\n".join(lines)
    part = b"x" * (1 << 20)
    if how == "chunks":
        part = b"%x\r\n%b\r\n" % (len(part), part)

    def send(_: int) -> tuple[socket.socket, bytes]:
        made = socket.create_connection(("127.0.0.1", guarded_page.port), timeout=60)
        made.sendall(head.encode())
        with suppress(ConnectionError):
            for _ in range(8):
                made.sendall(part)
        return made, made.recv(1000)

    before = peak_of(guarded_page.process.pid)
    with ThreadPoolExecutor(40) as threads:
        sent = list(threads.map(send, range(40)))
    try:
        assert all(answer.startswith(b"HTTP/1.1 413 ") for _, answer in sent), sent
        assert peak_of(guarded_page.process.pid) - before < 60 << 20
    finally:
        for made, _ in sent:
            made.close()


def test_who_has_signed_in_may_send_a_large_form(
    guarded_page: HttpServer, center: TimeoutCenter, tokens: Any
) -> None:
    visitor = Visitor(guarded_page)
    visitor.sign_in(tokens["anna"][0])
    center.queues.declare("mail")
    ids = [f"{n:0>500}" for n in range(1_000)]
    asked = visitor.post("do", queue="mail", act="cancel", id=ids)
    assert asked.status == 404 and b"these messages are gone" in asked.body
    assert visitor.post("do", queue="mail", act="cancel", id="x" * (1 << 20)).status == 413
    assert Visitor(guarded_page).post("login", token="x" * (20 << 10)).status == 413


def test_a_server_has_so_many_connections_and_says_so_to_the_next(
    server: Server | Cluster, tmp_path: Path
) -> None:
    with HttpServer(server.toc_url, "--connections", "20") as api:
        held = [api.connect() for _ in range(20)]
        for one in held:
            one.connect()
        more = api.connect()
        more.connect()
        reply = api.ask("GET", "/v1/queues", over=more)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert reply.json["type"] == "urn:celery-toc:busy"
        assert api.ask("GET", "/v1/queues", over=held[0]).status == 200
        for one in held[:10]:
            one.close()
        wait_until(lambda: api.get("/v1/queues").status != 503, 10)
        said = api.stop()
    assert said.count("20 connections are open, as many as there may be") == 1


def test_what_the_page_says_of_a_token_makes_one_with_which_one_signs_in(
    server: Server | Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.txt"
    file.write_text(f"{new_token('anna', 'read', '*')[1]}\n")
    with HttpServer(server.toc_url, "--tokens", str(file)) as made:
        visitor = Visitor(made)
        said = html.unescape(visitor.get("login").body.decode())
        command, option = re.findall(r"<code>(.*?)</code>", said)
        assert option == "--tokens tokens.txt"
        command = command.replace("python", sys.executable, 1)
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
        secret = done.stderr.split()[-1]
        wait_until(lambda: visitor.sign_in(secret).status == 303, 10, done)


def test_a_session_has_a_new_cookie_that_tells_nothing_of_the_token(
    guarded_page: HttpServer, tokens: Any, center: TimeoutCenter
) -> None:
    visitor = Visitor(guarded_page, **{"x-forwarded-proto": "https"})
    visitor.get("login")
    before = visitor.session
    reply = visitor.post("login", token=tokens["anna"][0])
    said = reply.headers["set-cookie"]
    assert "HttpOnly" in said and "SameSite=Strict" in said and "Secure" in said
    assert "Path" not in said
    cookie = visitor.session
    assert cookie != before and len(cookie) == 43
    assert tokens["anna"][0] not in said
    keys = [key.decode() for key in center.client.keys("*session*")]
    assert len(keys) == 1 and cookie not in keys[0]
    kept = center.client.get(keys[0])
    assert cookie.encode() not in kept and tokens["anna"][0].encode() not in kept
    assert 0 < center.client.ttl(keys[0]) <= 12 * 3600
    assert visitor.get("").status == 200
    assert audit(center)[-1][:2] == ["anna", "sign in"]


def test_signing_in_again_ends_the_session_before(
    guarded_page: HttpServer, signed_in: Any, tokens: Any
) -> None:
    anna = signed_in("anna")
    before = Visitor(guarded_page)
    before.cookies = dict(anna.cookies)
    assert before.get("").status == 200
    anna.get("login")
    assert anna.post("login", token=tokens["ben"][0]).status == 303
    assert anna.cookies != before.cookies and b"Sign out ben" in anna.get("").body
    assert before.get("").status == 401


def test_two_servers_of_one_host_do_not_sign_each_other_out(
    server: Server | Cluster, signed_in: Any, tokens: Any, center: TimeoutCenter
) -> None:
    """A browser gives the cookies of a host to all of its ports."""
    anna = signed_in("anna")
    center.put("mail", "order-7", b"x", delay=3600)
    line = new_token("dora", "read,write", "*")
    with HttpServer(server.toc_url, environment={"TOC_HTTP_TOKENS": line[1]}) as made:
        dora = Visitor(made)
        dora.cookies = anna.cookies  # one browser
        assert dora.get("").status == 401
        assert dora.sign_in(line[0]).status == 303
        for visitor, name in ((anna, b"Sign out anna"), (dora, b"Sign out dora")):
            assert name in visitor.get("").body
        moved = anna.post("do", queue="mail", id="order-7", act="run")
        # What was done is told where it was done.
        assert b"made due" not in dora.get("").body
        assert b"1 message made due" in anna.follow(moved).body
        assert dora.post("leave").status == 303
        assert b"Sign out anna" in anna.get("").body
        # Without a port, it is that of the scheme, as behind a proxy.
        alone = Visitor(made, host="toc.example.com")
        alone.get("login")
        assert [*alone.cookies] == ["toc_session"]


def test_the_cookie_is_secure_if_the_client_speaks_tls(guarded_page: HttpServer) -> None:
    for said, is_secure in (
        ("https", True),
        ("HTTPS, http", True),
        ("http, https", False),
        ("", False),
    ):
        visitor = Visitor(guarded_page, **({"x-forwarded-proto": said} if said else {}))
        cookie = visitor.get("login").headers["set-cookie"]
        assert ("Secure" in cookie) is is_secure, said
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie


def test_signing_out_ends_the_session_everywhere(
    server: Server | Cluster, guarded_page: HttpServer, signed_in: Any, tokens: Any
) -> None:
    visitor = signed_in("anna")
    lines = ";".join(line for _, line in tokens.values())
    with HttpServer(server.toc_url, environment={"TOC_HTTP_TOKENS": lines}) as other:
        # Both are behind one address.
        elsewhere = Visitor(other, host=f"127.0.0.1:{guarded_page.port}")
        elsewhere.cookies = dict(visitor.cookies)
        assert elsewhere.get("").status == 200  # each process knows it
        cookies = dict(visitor.cookies)
        assert visitor.post("leave").status == 303
        visitor.cookies = cookies
        assert visitor.get("").status == 401
        wait_until(lambda: elsewhere.get("").status == 401)  # it is asked after five seconds


def test_a_session_of_a_token_that_was_replaced_counts_no_more(
    server: Server | Cluster, signed_in: Any
) -> None:
    visitor = signed_in("anna")
    visitor.headers["host"] = f"127.0.0.1:{visitor.server.port}"
    line = new_token("anna", "read,write,operate", "*")[1]
    with HttpServer(server.toc_url, environment={"TOC_HTTP_TOKENS": line}) as other:
        visitor.server = other
        assert visitor.get("").status == 401


@pytest.mark.cluster
def test_a_token_sees_and_does_what_its_roles_and_queues_allow(
    signed_in: Any, center: TimeoutCenter
) -> None:
    for queue in ("mail", "sms", "m-1"):
        center.put(queue, f"{queue}-7", b"x", delay=3600)
    ben, carl = signed_in("ben"), signed_in("carl")
    shown = wait_for(ben, "", "m-1")  # the look before this may be of a moment ago
    assert "mail" in shown and "m-1" in shown and "sms" not in shown
    assert re.search(r"<b>2</b><span>scheduled", shown)  # and not three
    for view in ("queue?queue=sms", "message?queue=sms&id=sms-7", "limits?queue=sms", "audit"):
        assert ben.get(view).status == 403, view
    listed = ben.get("queue?queue=mail").body.decode()
    assert "mail-7" in listed and "Cancel" not in listed and "Pause" not in listed
    ask = {"queue": "mail", "id": "mail-7", "act": "cancel", "sure": "1"}
    assert ben.post("do", **ask).status == 403
    assert ben.post("all", queue="mail", act="cancel").status == 403
    assert carl.get("queue?queue=m-1").status == 403
    assert carl.post("pause", queue="mail", act="pause").status == 403
    assert carl.post("limits", queue="mail", **{"limit.rate": "1/s"}).status == 403
    for act in ("requeue", "purge"):
        assert carl.post("do", queue="mail", id="mail-7", act=act, sure="1").status == 403
    assert carl.post("do", queue="sms", id="sms-7", act="cancel", sure="1").status == 403
    assert center.counts("mail").scheduled == 1 and center.queues.paused() == set()
    begun = carl.post("all", queue="mail", act="cancel")
    job = begun.headers["location"]
    assert ben.get(job).status == 200
    assert ben.post("job", id=job.partition("id=")[2], do="go").status == 403
    assert carl.post("do", **ask).status == 303
    assert center.counts("mail").scheduled == 0
    done = [entry for entry in audit(center) if entry[1] != "sign in"]
    assert done == [["carl", "cancel", "mail", "mail-7", 1]]


def test_the_rate_of_a_token_holds_for_the_page(signed_in: Any, tokens: Any) -> None:
    visitor = Visitor(signed_in("anna").server)
    visitor.get("login")
    statuses = [visitor.post("login", token=tokens["slow"][0]).status]
    statuses += [visitor.get("").status for _ in range(3)]
    assert statuses[0] == 303 and 429 in statuses


def test_everybody_may_look_if_that_is_asked_for_and_do_nothing(
    server: Server | Cluster, center: TimeoutCenter, tokens: Any
) -> None:
    center.put("mail", "order-7", b"x", delay=3600)
    with HttpServer(
        server.toc_url, "--anonymous-read", environment={"TOC_HTTP_TOKENS": tokens["anna"][1]}
    ) as made:
        visitor = Visitor(made)
        shown = visitor.get("queue?queue=mail")
        assert shown.status == 200 and b"order-7" in shown.body
        assert b"Cancel" not in shown.body and b"Sign in" in shown.body
        ask = {"queue": "mail", "id": "order-7", "act": "cancel", "sure": "1"}
        assert visitor.post("do", **ask).status == 401
        # A page in a browser whose name leads here sees nothing.
        assert Visitor(made, host="evil.example").get("").status == 403
        assert visitor.sign_in(tokens["anna"][0]).status == 303
        assert visitor.post("do", **ask).status == 303
    assert not center.get("order-7")


def test_the_log_says_what_was_refused_and_no_name_makes_a_line_of_its_own(
    server: Server | Cluster, center: TimeoutCenter, tokens: Any
) -> None:
    center.put("mail", "order-7", b"x", delay=3600)
    lines = ";".join(line for _, line in tokens.values())
    with HttpServer(server.toc_url, environment={"TOC_HTTP_TOKENS": lines}) as made:
        ben, anna = Visitor(made), Visitor(made)
        ben.get("login")
        assert ben.post("login", token="guessed").status == 401
        ben.sign_in(tokens["ben"][0])
        forged = "order-7\nanna: purge in 'mail', all: 7\x85x\u2028y"
        assert ben.post("do", queue="mail", id=forged, act="cancel\r\nb").status == 422
        assert ben.post("do", queue=forged, id="order-7", act="cancel").status == 403
        assert ben.post("do", "0" * 64, queue="mail", id="order-7", act="cancel").status == 403
        anna.sign_in(tokens["anna"][0])
        # Nothing has that id: it was done to none.
        assert anna.post("do", queue="mail", id=forged, act="run").status == 303
        said = made.stop().splitlines()
    refused = [line.partition(" WARNING ")[2] for line in said if "is refused" in line]
    assert refused == [
        "somebody: login is refused: this token is not known here",
        f"ben: do cancel in {forged!r} is refused: this needs a token with the role write of queue "
        f"{forged!r}",
        "ben: do cancel in 'mail' is refused: this form is not of this session; load the page "
        "again, with cookies allowed",
    ]
    assert all(line[:2] == "20" for line in said), said  # each begins with its time
    # What was refused is not in Redis: it would push out what was done.
    assert audit(center) == [
        ["ben", "sign in", "", "", -1],
        ["anna", "sign in", "", "", -1],
        ["anna", "run", "mail", forged, 0],
    ]


# -- what is done to all that match
