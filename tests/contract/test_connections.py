"""K8, X7: the URLs that lead to a server."""

from __future__ import annotations

import os
import socket
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from kombu import Connection, Exchange, Queue

import kombu_toc
from kombu_toc.client.connection import Client, close_idle
from kombu_toc.consumer.upkeeper import sweep

from ..support.fixtures import failure
from ..support.servers import Server

pytestmark = [pytest.mark.one_server("the URLs are those of one")]


def round_trip(connection: Connection) -> None:
    """Send a message and get it back."""
    with connection, connection.SimpleQueue("trip") as queue:
        queue.put({"there": "and back"})
        message = queue.get(timeout=5)
        assert message.payload == {"there": "and back"}
        message.ack()


@pytest.fixture
def by_socket(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    path = tmp_path / "s"
    server = Server(tmp_path, "--unixsocket", str(path)).start()
    yield server, path
    server.stop()


@pytest.mark.versions
def test_a_unix_socket_leads_to_a_server(by_socket: tuple[Server, Path]) -> None:
    server, path = by_socket
    round_trip(Connection(f"toc+unix://{path}?db=3"))
    with server.client(3) as client:
        assert client.hexists("toc:{toc}:topics", "trip")


@pytest.mark.versions
@pytest.mark.parametrize("url", ["toc://127.0.0.1:{port}/4", "toc+redis://127.0.0.1:{port}/4"])
def test_a_url_names_the_database(server: Server, url: str) -> None:
    round_trip(Connection(url.format(port=server.port)))
    with server.client(4) as client:
        assert client.hexists("toc:{toc}:topics", "trip")
        client.flushdb()


@pytest.mark.versions
def test_a_database_that_the_server_has_not_is_named(single_server: Server) -> None:
    """To whoever connects as a broker, and to a center alone."""
    url = f"toc+redis://127.0.0.1:{single_server.port}/99"
    said = rf"127.0.0.1:{single_server.port} has no database 99; use a number that its setting"
    with Connection(url) as connection, pytest.raises(kombu_toc.ConfigurationError, match=said):
        connection.ensure_connection(max_retries=1)
    with pytest.raises(kombu_toc.ConfigurationError, match=said):
        kombu_toc.center_for(url).queues.names()
    with pytest.raises(kombu_toc.ConfigurationError, match=said):
        kombu_toc.center_for(url).put("mail", "order-7", b"remind")


@pytest.mark.versions
def test_an_acl_user_gets_in_by_name_and_password(server: Server, client: redis.Redis) -> None:
    password = "p@ss:w/rd"
    client.execute_command("ACL", "SETUSER", "app", "on", f">{password}", "~*", "&*", "+@all")
    try:
        url = f"toc+redis://app:{quote(password, safe='')}@127.0.0.1:{server.port}/0"
        round_trip(Connection(url))
        connection = Connection(url)
        round_trip(connection.clone())
        assert password not in str(connection.as_uri())
        assert quote(password, safe="") not in connection.as_uri()
        assert connection.as_uri(include_password=True) == url
    finally:
        client.execute_command("ACL", "DELUSER", "app")


class Rotating(redis.CredentialProvider):
    """Gives the password that holds just now."""

    password = "first"
    asked = 0

    def get_credentials(self) -> tuple[str, str]:
        # The thread that keeps leases connects when it has something to say.
        Rotating.asked += threading.current_thread() is threading.main_thread()
        return "rotating", Rotating.password


#: Kombu 5.3 knows of none.
PLACES = ["options", "url"]
if "credential_provider" in signature(Connection.__init__).parameters:
    PLACES.append("connection")


@pytest.mark.versions
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bound", ["", "max_connections=5"])
def test_a_new_password_reaches_new_connections(
    server: Server, client: redis.Redis, place: str, bound: str
) -> None:
    """The old ones go on, as Redis has it, until they break."""
    url, given = f"toc+redis://127.0.0.1:{server.port}/0?{bound}", {}
    if place == "connection":
        given["credential_provider"] = Rotating()
    elif place == "options":
        given["transport_options"] = {"credential_provider": Rotating()}
    else:
        url += f"&credential_provider={__name__}:Rotating"
    user = ("ACL", "SETUSER", "rotating", "on", "~*", "&*", "+@all", "resetpass")
    Rotating.password = "first"
    client.execute_command(*user, ">first")
    try:
        with Connection(url, **given) as connection:
            round_trip_on(connection)
            asked = Rotating.asked
            Rotating.password = "second"
            client.execute_command(*user, ">second")
            round_trip_on(connection)
            assert Rotating.asked == asked
            client.client_kill_filter(_type="normal", skipme=True)
            connection.close()
            connection.ensure_connection(max_retries=2)
            round_trip_on(connection)
            assert Rotating.asked > asked
    finally:
        client.execute_command("ACL", "DELUSER", "rotating")


@pytest.mark.versions
def test_who_was_let_in_otherwise_before_has_his_queues_kept(
    server: Server, client: redis.Redis
) -> None:
    """A5, K6: what one connection may do no more, another of the process still may"""
    client.execute_command("ACL", "SETUSER", "gone", "on", "~*", "&*", "+@all", ">first")
    url, brief = f"toc+redis://gone:{{}}@127.0.0.1:{server.port}/0", {"toc_stale_after": 1}
    with Connection(url.format("first"), transport_options=brief) as before:
        passing(before, "a").declare()
        client.execute_command("ACL", "SETUSER", "gone", "resetpass", ">second")
        client.client_kill_filter(_type="normal", skipme=True)
        with Connection(url.format("second"), transport_options=brief) as after:
            Queue("b", Exchange("w", "direct"), "b", auto_delete=True)(
                after.default_channel
            ).declare()
            time.sleep(2.5)  # the server's own clock decides what is stale
            sweep(after.transport.center)
            assert after.transport.center.queues.names() == ["b"]
    client.execute_command("ACL", "DELUSER", "gone")


def passing(connection: Connection, name: str) -> Queue:
    return Queue(name, Exchange("w", "direct"), name, auto_delete=True)(connection.default_channel)


def round_trip_on(connection: Connection) -> None:
    queue = connection.SimpleQueue("trip")
    queue.put("x")
    queue.get(timeout=5).ack()
    queue.close()


@pytest.mark.parametrize("given", ["no.such:Provider", "collections:OrderedDict", 7])
def test_what_is_no_credential_provider_is_refused(given: object) -> None:
    with pytest.raises(kombu_toc.ConfigurationError, match="credential_provider"):
        Connection("toc://", transport_options={"credential_provider": given}).connect()


def test_prefixes_keep_apps_apart(server: Server, client: redis.Redis) -> None:
    options = {"global_keyprefix": "shop:", "toc_prefix": "center:"}
    round_trip(Connection(server.toc_url, transport_options=options))
    keys = client.keys("*")
    assert keys
    assert all(key.startswith(b"shop:center:") for key in keys)


@pytest.mark.versions
def test_kombus_failover_goes_on_to_the_next_url(server: Server, client: redis.Redis) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        dead = f"toc+redis://127.0.0.1:{taken.getsockname()[1]}/0"
        connection = Connection(f"{dead};{server.toc_url}")
        connection.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
        assert connection.as_uri() == server.toc_url
        round_trip(connection)


@pytest.mark.versions
def test_an_embedded_server_leads_to_itself(tmp_path: Path) -> None:
    url = f"toc+embedded://{tmp_path / 'data'}"
    round_trip(Connection(url))
    center = kombu_toc.center_for(url)
    assert center.queues.names() == ["trip"]
    center.client.close()
    kombu_toc.EmbeddedServer.join(str(tmp_path / "data")).leave()


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the embedded server that keeps nothing, where all users may write."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"celery-toc-{os.getuid()}"


def test_the_embedded_server_of_a_user_has_a_folder_that_is_nobody_elses(shared: Path) -> None:
    server = kombu_toc.EmbeddedServer.join()
    assert shared.stat().st_mode & 0o777 == 0o700
    assert kombu_toc.EmbeddedServer.join() is server
    server.leave()


@pytest.mark.parametrize("planted", ["folder", "open folder", "link", "file", "socket"])
def test_what_somebody_has_planted_for_the_embedded_server_is_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    said = {
        "folder": "belongs to another user",
        "open folder": r"open to other users \(mode 777\)",
        "link": "is not a folder",
        "file": "is not a folder",
        "socket": "is not a socket",
    }[planted]
    if planted == "folder":
        shared = shared.with_name("celery-toc-4242")
        monkeypatch.setattr(os, "getuid", lambda: 4242)
    if planted == "link":
        shared.with_name("elsewhere").mkdir(mode=0o700)
        shared.symlink_to(shared.with_name("elsewhere"))
    elif planted == "file":
        shared.write_text("")
    else:
        shared.mkdir(mode=0o700)
    if planted == "open folder":
        shared.chmod(0o777)
    elif planted == "socket":
        (shared / "server.sock").symlink_to("/run/anothers.sock")
    with pytest.raises(kombu_toc.EmbeddedServerError, match=f"{shared}.* {said}.*planted"):
        kombu_toc.center_for("toc+embedded://").queues.names()


def test_an_embedded_server_that_cannot_keep_its_data_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(kombu_toc.EmbeddedServerError, match="file"):
        kombu_toc.EmbeddedServer.join(str(tmp_path / "file"))


class Old(socketserver.StreamRequestHandler):
    """Answers as a Redis that is too old to be had for tests any more."""

    INFO = b"# Server\r\nredis_version:5.0.14\r\nredis_mode:standalone\r\n"

    def handle(self) -> None:
        while head := self.rfile.readline():
            words = []
            for _ in range(int(head[1:])):
                words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2).strip())
            known = words[0].upper() == b"INFO"
            reply = b"$%d\r\n%b\r\n" % (len(self.INFO), self.INFO) if known else b"+OK\r\n"
            self.wfile.write(reply)


def test_a_server_that_is_too_old_is_told_for_what_it_is() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Old) as old:
        old.daemon_threads = True
        threading.Thread(target=old.serve_forever, daemon=True).start()
        where = f"127.0.0.1:{old.server_address[1]}"
        error = failure(Connection(f"toc+redis://{where}/0"), kombu_toc.ServerError)
        old.shutdown()
    words = f"{where} runs Redis 5.0.14; 6.2 is the oldest that will do: upgrade it"
    assert str(error) == words


def test_a_server_that_may_lose_messages_is_told_what_to_set(tmp_path: Path) -> None:
    """Y9"""
    (tmp_path / "bad").mkdir()
    (tmp_path / "good").mkdir()
    evicts = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    bad = Server(tmp_path / "bad", *evicts).start()
    durable = ("--appendonly", "yes", "--save", "3600 1", "--maxmemory", "100mb")
    good = Server(tmp_path / "good", *durable).start()
    try:
        with bad.client() as client:
            eviction, restart = kombu_toc.durability_warnings(client)
            assert "allkeys-lru" in eviction
            assert "noeviction" in eviction
            assert restart == (
                "Redis has no persistence: all tasks are lost when it restarts; set appendonly yes"
            )
        with good.client() as client:
            assert kombu_toc.durability_warnings(client) == []
    finally:
        bad.stop()
        good.stop()


@pytest.mark.parametrize(
    ("rules", "loses"),
    [
        ("3600 1", "all tasks that were sent in the 60 minutes before"),
        ("3600 1 300 100 60 10000", "all tasks that were sent in the 60 minutes before"),
        ("60 1", "all tasks that were sent in the 60 seconds before"),
        ("60 10000", "all tasks that were sent since the last one"),
    ],
)
def test_a_server_with_snapshots_only_is_told_what_a_crash_costs(
    tmp_path: Path, rules: str, loses: str
) -> None:
    with Server(tmp_path) as server, server.client() as client:
        client.config_set("save", rules)  # Redis 6.2 takes no rule in one argument
        [warning] = kombu_toc.durability_warnings(client)
        assert f"(save {rules}): a crash can lose {loses};" in warning
        assert warning.endswith("set appendonly yes")


def test_a_server_that_does_not_tell_all_of_its_configuration_still_tells_what_it_does(
    tmp_path: Path,
) -> None:
    options = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    options += ("--rename-command", "CONFIG", "")
    with Server(tmp_path, *options) as server, server.client() as client:
        [eviction] = kombu_toc.durability_warnings(client)
        assert "allkeys-lru" in eviction


def test_clients_are_made_in_other_threads_while_idle_connections_are_closed() -> None:
    """A thread that consumes looks through the clients of all threads."""
    made: list[Client] = []

    def make() -> None:
        for _ in range(400):
            made.append(Client(redis.ConnectionPool(port=1)))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        makers = [threading.Thread(target=make) for _ in range(4)]
        for one in makers:
            one.start()
        while any(one.is_alive() for one in makers):
            close_idle(3600)
    finally:
        sys.setswitchinterval(before)
    assert len(made) == 1600
