"""Who may do what over HTTP: tokens, roles, queues, rates. Without tokens: this machine only."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kombu_toc import ConfigurationError, TimeoutCenter
from kombu_toc.http import Problem, Token, Tokens, matches, new_token, read_tokens
from kombu_toc.http.fields import problem_of
from kombu_toc.http.queues import page_of_names

from ..support import nursery
from ..support.cases import each
from ..support.certificates import Authority
from ..support.cluster import Cluster
from ..support.http_server import HttpServer, mounted, with_tokens
from ..support.inspection import put_some
from ..support.page_visitor import Visitor, audit
from ..support.servers import Server
from ..support.waiting import wait_until

SECRET = {"all": "", "producer": "", "reader": "", "slow": ""}


def lines() -> str:
    made = []
    for name, roles, queues, more in (
        ("all", "read,write,operate", "*", ""),
        ("producer", "write", "mail,sms-*", ""),
        ("reader", "read", "mail", ""),
        ("slow", "read", "*", " rate=6/m"),
    ):
        SECRET[name], line = new_token(name, roles, queues)
        made.append(line + more)
    return "\n".join(["# who may do what", "", *made])


def own_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tokens for one test only."""
    for name, secret in SECRET.items():
        monkeypatch.setitem(SECRET, name, secret)
    file = folder / "tokens.txt"
    file.write_text(lines())
    return file


@pytest.fixture(scope="module")
def shared(
    server: Server | Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpServer]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.txt"
    file.write_text(lines())
    with HttpServer(server.toc_url, "--tokens", str(file), "--host", "0.0.0.0") as made:
        yield made


@pytest.fixture
def api(shared: HttpServer, center: TimeoutCenter) -> HttpServer:
    for queue in ("mail", "sms-1", "orders"):
        center.queues.declare(queue)
    shared.center = center
    return shared


def status(api: HttpServer, who: str, method: str, path: str, document: object = None) -> int:
    headers = {"authorization": f"Bearer {SECRET[who]}"}
    return api.ask(method, path, document, headers=headers).status


def test_a_token_allows_its_roles_for_its_queues_and_nothing_else(api: HttpServer) -> None:
    task = {"text": "x"}
    put, mail = "/v1/queues/{}/tasks", "/v1/queues/mail"
    assert status(api, "producer", "POST", put.format("mail"), task) == 201
    assert status(api, "producer", "POST", put.format("sms-1"), task) == 201
    assert status(api, "producer", "POST", put.format("orders"), task) == 403
    assert status(api, "producer", "GET", put.format("mail")) == 403
    assert status(api, "producer", "PATCH", mail, {"retries": 1}) == 403
    assert status(api, "reader", "GET", put.format("mail")) == 200
    assert status(api, "reader", "GET", put.format("orders")) == 403
    assert status(api, "reader", "GET", "/scale/orders") == 403
    assert status(api, "reader", "POST", f"{mail}:lease") == 403
    assert status(api, "reader", "GET", "/v1/library/tasks") == 403  # it is of all queues
    assert status(api, "all", "GET", "/v1/library/tasks") == 404  # there is none
    assert status(api, "all", "PATCH", mail, {"retries": 1}) == 200
    assert api.center.counts("orders").ready == 0


def test_no_operation_is_open_to_who_has_not_its_role_for_its_queue(api: HttpServer) -> None:
    """All that the document has, however the name of another queue is written."""
    connection, asked = api.connect(), 0
    for path, operations in api.get("/openapi.json").json["paths"].items():
        for method, operation in operations.items():
            if "security" not in operation:
                continue  # it needs no token
            body = {} if method in ("post", "put", "patch") else None
            for queue in ("orders", "mail/../orders", "MAIL", " mail", "mail\0", "mail/", "sms"):
                there = path.format(queue=quote(queue, safe=""), id="x")
                for who in ("", "toc_wrong", SECRET["producer"], SECRET["reader"]):
                    if (path, who) == ("/v1/queues", SECRET["reader"]):
                        continue  # it gets those that it may see
                    sent = {"authorization": f"Bearer {who}"} if who else {}
                    reply = api.ask(method.upper(), there, body, headers=sent, over=connection)
                    known = who.startswith("toc_") and who != "toc_wrong"
                    assert reply.status == (403 if known else 401), (method, there, reply)
                    asked += 1
    assert asked > 800


def test_a_list_of_queues_has_those_that_the_token_may_see(api: HttpServer) -> None:
    def names(who: str) -> list[str]:
        headers = {"authorization": f"Bearer {SECRET[who]}"}
        return [one["name"] for one in api.get("/v1/queues", headers=headers).json["queues"]]

    assert names("reader") == ["mail"]
    assert names("all") == ["mail", "orders", "sms-1"]


def test_pages_of_queues_have_all_that_a_token_may_see(api: HttpServer) -> None:
    for number in range(9):
        for name in ("a-{}", "sms-{}", "{}-mail", "sms"):
            api.center.queues.declare(name.format(number))

    def names(patterns: str, limit: int) -> list[str]:
        _, line = new_token("one", "read", patterns)
        [token] = read_tokens(line, "x")
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            page, after = listed(token, after, limit)
            assert len(page) <= limit
            found += page
        return found

    def listed(token: Token, after: str, limit: int) -> tuple[list[str], str | None]:
        async def use() -> tuple[list[str], str | None]:
            return await page_of_names(topics, token, after, limit)

        return asyncio.run(use())

    async def topics(**how: Any) -> list[str]:
        return api.center.queues.names(**how)

    every = api.center.queues.names()
    for patterns in ("*", "sms-*", "mail,sms-*", "*-mail", "sms", "nobody", "s*,sms-*,a-?", "?-*"):
        allowed = patterns.split(",")
        expected = [one for one in every if matches(one, allowed)]
        for limit in (1, 2, 5, 100):
            assert names(patterns, limit) == expected, (patterns, limit)
    assert len(every) > 25


def test_a_receipt_gives_no_right_to_another_queue(api: HttpServer, center: TimeoutCenter) -> None:
    center.put("orders", "one", b"x")
    [message] = center.pop("orders").messages
    receipts = {"receipts": [message.receipt]}
    assert status(api, "producer", "POST", "/v1/queues/orders:ack", receipts) == 403
    assert status(api, "producer", "POST", "/v1/queues/mail:ack", receipts) == 422
    assert center.ack([message]) == 1


@each(
    "sent", ["", "Bearer", "Bearer ", "Bearer toc_wrong", "Basic dG9jOg==", "Bearer \xe4", "toc_x"]
)
def test_without_a_valid_token_there_is_nothing(api: HttpServer, sent: str) -> None:
    for path in ("/v1/queues", "/v1/queues/mail/tasks", "/scale/mail"):
        reply = api.get(path, headers={"authorization": sent} if sent else {})
        assert (reply.status, reply.json["type"]) == (401, "urn:celery-toc:unauthorized")
        assert reply.headers["www-authenticate"].startswith("Bearer")
    for open_to_all in ("/healthz", "/readyz", "/openapi.json"):
        assert api.get(open_to_all).status == 200


def test_a_rate_is_kept_and_says_when_to_come_again(api: HttpServer) -> None:
    headers = {"authorization": f"Bearer {SECRET['slow']}"}
    found = [api.get("/v1/queues/mail/counts", headers=headers) for _ in range(5)]
    assert found[0].status == 200
    [refused, *_] = [reply for reply in found if reply.status != 200]
    assert refused.status == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 10
    assert status(api, "all", "GET", "/v1/queues/mail/counts") == 200


def test_answers_are_kept_for_each_token_apart(api: HttpServer) -> None:
    ids = set()
    for who in ("all", "producer"):
        headers = {"authorization": f"Bearer {SECRET[who]}", "idempotency-key": "same"}
        ids.add(api.post("/v1/queues/mail/tasks", {"text": "x"}, headers=headers).json["id"])
    assert len(ids) == 2


def test_no_secret_is_in_the_log_or_in_an_answer(tmp_path: Path) -> None:
    """Also if everything goes wrong: there is no broker, and the token is the wrong one."""
    secret, line = new_token("one", "read", "*")
    broker = "toc+redis://user:pa55word@127.0.0.1:1/0"
    with with_tokens(broker, lines=line) as api:
        said = ""
        for token in (secret, "toc_another"):
            headers = {"authorization": f"Bearer {token}", "idempotency-key": "k"}
            for path in ("/v1/queues", "/readyz", f"/v1/queues/{'x' * 100}:lease"):
                said += api.get(path, headers=headers).body.decode()
                said += api.post(path, headers=headers).body.decode()
        said += api.stop() + "".join(api.said)
    assert "broker" in said
    for hidden in (secret, "pa55word", "toc_another", line.split()[1]):
        assert hidden not in said


def test_what_is_changed_over_http_is_in_the_audit_log_and_what_is_refused_is_logged(
    server: Server | Cluster, center: TimeoutCenter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_some(center, "mail", ("a", "b", "c"), body=b"x", delay=3600)
    file = own_file(tmp_path, monkeypatch)
    mail = "/v1/queues/mail"
    with HttpServer(server.toc_url, "--tokens", str(file)) as made:
        when = {"delay": 60}
        for method, path, document in (
            ("POST", f"{mail}/tasks/a:reschedule", when),
            ("POST", f"{mail}/tasks/a:run", None),
            ("DELETE", f"{mail}/tasks/b", None),
            ("POST", f"{mail}/tasks:cancel", {"ids": ["c", "d"]}),
            ("PATCH", mail, {"retries": 3}),
            ("POST", f"{mail}:pause", None),
            ("POST", f"{mail}:purge", None),
        ):
            for _ in range(2):  # what is repeated is done once
                key = {"idempotency-key": path} if method == "POST" else {}
                headers = {"authorization": f"Bearer {SECRET['all']}", **key}
                reply = made.ask(method, path, document, headers=headers)
            assert reply.status in (200, 404), reply
        for method, path in (("GET", "/v1/queues/orders"), ("POST", f"{mail}/tasks/a:run")):
            assert status(made, "reader", method, path) == 403
        assert made.get(mail, headers={"authorization": "Bearer guessed"}).status == 401
        said = made.stop()
    assert audit(center) == [
        ["all", "reschedule", "mail", 'a {"delay": 60}', 1],
        ["all", "run", "mail", "a", 1],
        ["all", "cancel", "mail", "b", 1],
        ["all", "cancel", "mail", '{"ids": ["c", "d"]}', 1],
        ["all", "alter", "mail", '{"retries": 3}', -1],
        ["all", "alter", "mail", '{"retries": 3}', -1],
        ["all", "pause", "mail", "", -1],
        ["all", "purge all that waits", "mail", "", 1],
    ]
    refused = [line.partition(" WARNING ")[2] for line in said.splitlines() if "refused" in line]
    assert refused == [
        "reader: GET /v1/queues/{queue} in 'orders' is refused: this needs a token with the role "
        "read of queue 'orders'",
        "reader: POST /v1/queues/{queue}/tasks/{id}:run in 'mail' is refused: this needs a token "
        "with the role write of queue 'mail'",
        "somebody at 127.0.0.1: GET /v1/queues/{queue} in 'mail' is refused: this token is not "
        "known here",
    ]


def test_a_token_that_is_removed_ends_and_one_that_is_added_counts_without_a_restart(
    server: Server | Cluster, center: TimeoutCenter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    center.queues.declare("mail")
    file = own_file(tmp_path, monkeypatch)
    with HttpServer(server.toc_url, "--tokens", str(file)) as made:
        visitor = Visitor(made)
        assert visitor.sign_in(SECRET["all"]).status == 303
        assert visitor.get("").status == status(made, "all", "GET", "/v1/queues") == 200
        with ThreadPoolExecutor() as pool:
            waits = pool.submit(status, made, "all", "POST", "/v1/queues/mail:lease", {"wait": 20})
            wait_until(lambda: center.client.info("clients")["blocked_clients"])
            secret, line = new_token("new", "read", "*")
            file.write_text(line)
            monkeypatch.setitem(SECRET, "new", secret)
            wait_until(lambda: status(made, "new", "GET", "/v1/queues") == 200)
            assert status(made, "all", "GET", "/v1/queues") == 401
            assert visitor.get("").status == 401
            center.put("mail", "one", b"x")
            assert waits.result() == 401
            wait_until(lambda: center.counts("mail").ready == 1)
        file.write_text(line + "\nbroken")
        file.touch()
        time.sleep(1.2)  # it is looked at once a second: nothing must happen
        assert status(made, "new", "GET", "/v1/queues") == 200
        file.write_text("# none")
        wait_until(lambda: status(made, "new", "GET", "/v1/queues") == 401)
        assert made.get("/v1/queues").status == 401
        said = made.stop()
    assert "line 2" in said and "the tokens stay as they were" in said


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """The files of a certificate and of its key."""
    return Authority(tmp_path).certificate("server")


def test_who_says_nothing_while_tls_begins_is_cut_off(
    server: Server | Cluster, pair: tuple[str, str]
) -> None:
    certificate, key = pair
    program = (
        "import sys; from kombu_toc.http import serving; serving.HANDSHAKE_WITHIN = 0.3;"
        "from kombu_toc.http.__main__ import main; sys.exit(main())"
    )
    options = ("--certificate", certificate, "--key", key)
    with (
        HttpServer(server.toc_url, *options, command=("-c", program)) as api,
        socket.create_connection(("127.0.0.1", api.port), timeout=10) as client,
    ):
        assert client.recv(1) == b""


@each(
    ("options", "said"),
    [
        (["--key", "KEY"], "--key is of a certificate: name that with --certificate"),
        (["--certificate", "none.pem"], "none.pem: No such file"),
        (["--certificate", "CERTIFICATE", "--key", "none.pem"], "none.pem: No such file"),
        (["--certificate", "CERTIFICATE"], "cannot be used for TLS"),
        (["--certificate", "KEY", "--key", "KEY"], "cannot be used for TLS"),
    ],
)
def test_files_that_are_no_use_for_tls_are_named(
    server: Server | Cluster, pair: tuple[str, str], options: list[str], said: str
) -> None:
    certificate, key = pair
    files = {"CERTIFICATE": certificate, "KEY": key}
    command = [sys.executable, "-m", "kombu_toc.http", "--broker", server.toc_url, "--port", "0"]
    command += [files.get(one, one) for one in options]
    done = nursery.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("python -m kombu_toc.http: ") and said in line


def test_anonymous_read_allows_looking_and_nothing_else(server: Server | Cluster) -> None:
    _, line = new_token("one", "read,write", "*")
    with with_tokens(server.toc_url, "--anonymous-read", lines=line) as api:
        assert api.get("/v1/queues").status == 200
        assert api.post("/v1/queues/mail/tasks", {"text": "x"}).status == 403
        assert api.get("/v1/queues", headers={"authorization": "Bearer no"}).status == 401


def test_without_a_token_only_names_of_the_server_are_answered(server: Server | Cluster) -> None:
    """A page in a browser can have its own name lead here."""
    secret, line = new_token("one", "read", "*")
    named = ("--name", "toc.example.com")
    with with_tokens(server.toc_url, "--anonymous-read", *named, lines=line) as api:
        for host, status in (
            ("localhost:8088", 200),
            ("10.1.2.3", 200),
            ("[2001:db8::1]:80", 200),
            ("TOC.example.com:80", 200),
            ("evil.example:8088", 403),
            ("8088", 403),
            ("toc.example.com.evil.example", 403),
        ):
            reply = api.get("/v1/queues", headers={"host": host})
            assert reply.status == status, host
            if status == 403:
                assert reply.json["field"] == "host"
                both = {"host": host, "authorization": f"Bearer {secret}"}
                assert api.get("/v1/queues", headers=both).status == 200


# -- without tokens


def test_without_tokens_it_listens_on_loopback_only_and_says_so(server: Server | Cluster) -> None:
    command = [sys.executable, "-m", "kombu_toc.http", "--broker", server.toc_url]
    done = nursery.run([*command, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "listens on loopback only, and 0.0.0.0 is not" in done.stderr
    with HttpServer(server.toc_url) as api:
        assert any("this machine only" in line for line in api.said)


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 200),
        ({"host": "localhost:8088"}, 200),
        ({"host": "[::1]:8088"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "2130706433"}, 403),
        ({"host": "127.0.0.1.evil.example:80"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"x-forwarded-for": "10.0.0.1"}, 403),
        ({"forwarded": "for=10.0.0.1"}, 403),
        ({"via": "1.1 front"}, 403),
        ({"x-forwarded-proto": "https"}, 403),
        ({"x-real-ip": "10.0.0.1"}, 403),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else str(value),
)
def test_without_tokens_neither_a_page_nor_a_proxy_reaches_it(
    server: Server | Cluster, headers: dict[str, str], status: int, alone: HttpServer
) -> None:
    assert alone.get("/v1/queues", headers=headers).status == status


@pytest.fixture(scope="module")
def alone(server: Server | Cluster) -> Iterator[HttpServer]:
    with HttpServer(server.toc_url) as made:
        yield made


# -- tokens


@each(
    "line, said",
    [
        ("shop", "has a name, a hash, roles and queues"),
        ("shop toc_secret read *", "the hash of the token and not the token"),
        (f"shop sha256:{'0' * 64} reed *", "there is no role 'reed'"),
        (f"shop sha256:{'0' * 64} read * rate=fast", "rate=200/s"),
        (f"shop sha256:{'0' * 64} read * rate=0/s", "rate=200/s"),
        (f"a sha256:{'0' * 64} read *;a sha256:{'1' * 64} read *", "another token 'a'"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_and_not_shown(line: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=r"tokens\.txt, line [12]: .*") as caught:
        read_tokens(line, "tokens.txt")
    assert said in str(caught.value)
    assert "toc_secret" not in str(caught.value)


@each(
    "pattern, yes, no",
    [
        ("sms-*", ["sms-", "sms-1", "sms-a\nb"], ["sms", "xsms-1"]),
        ("a?c", ["abc", "a?c"], ["ac", "abbc"]),
        ("mail[1]", ["mail[1]"], ["mail1"]),
        ("[!a]", ["[!a]"], ["b", "!"]),
        ("[*]", ["[]", "[x]"], ["*", "x"]),
        ("a.b", ["a.b"], ["axb"]),
        ("a]", ["a]"], ["a"]),
    ],
)
def test_a_pattern_has_no_other_wildcards(pattern: str, yes: list[str], no: list[str]) -> None:
    _, line = new_token("one", "write", pattern)
    [token] = read_tokens(line, "x")
    for queue in yes:
        assert token.allows("write", queue), queue
    for queue in no:
        assert not token.allows("write", queue), queue


def test_a_rate_counts_by_the_clock() -> None:
    now = 100.0
    secret, line = new_token("one", "read", "*")
    tokens = Tokens(read_tokens(f"{line} rate=10/s", "x"), clock=lambda: now)
    for _ in range(10):  # a second's worth at once
        tokens.check(f"Bearer {secret}")
    with pytest.raises(Problem) as caught:
        tokens.check(f"Bearer {secret}")
    assert caught.value.status == 429
    now += 0.11
    tokens.check(f"Bearer {secret}")
    with pytest.raises(Problem):
        tokens.check(f"Bearer {secret}")


def test_each_token_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time would tell how far down the file a token is."""
    import hmac

    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    made = [new_token(f"t{n}", "read", "*") for n in range(20)]
    tokens = Tokens(read_tokens("\n".join(line for _, line in made), "x"))
    for secret in (made[0][0], made[19][0]):
        compared.clear()
        tokens.check(f"Bearer {secret}")
        assert len(compared) == 20


def test_a_fault_of_the_server_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    problem = problem_of(KeyError("inner"))
    assert problem.status == 500
    assert "inner" not in problem.detail
    assert "inner" in caplog.text


# -- mounted


def test_it_is_mounted_in_another_application(server: Server | Cluster, tmp_path: Path) -> None:
    places = ["/toc", "/to c/\N{SNOWMAN}", "/v1"]
    with mounted(tmp_path, server.toc_url, *places) as api:
        for number, root in enumerate(map(quote, places)):
            tasks = f"{root}/v1/queues/a%2Fb/tasks"
            made = api.post(tasks, {"id": f"{number}", "text": "x"})
            assert (made.status, made.json["queue"]) == (201, "a/b")
            assert api.get(f"{tasks}/{number}").status == 200
            assert api.get(f"{root}/openapi.json").json["servers"] == [{"url": root}]
        assert api.get("/v1/queues").status == 404
