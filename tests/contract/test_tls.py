"""TLS: certificates are checked, and one that is not trusted is told with what to change."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from kombu import Connection

import kombu_toc

from ..meta.test_readme import broker_of
from ..support import nursery
from ..support.cases import each, night
from ..support.certificates import Authority, TLSServer, tls_options, tls_program
from ..support.fixtures import failure
from ..support.proxy import Proxy
from ..support.sentinels import NAME, Deployment
from .test_connections import round_trip

NODE = Path(__file__).parents[2] / "examples" / "node"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    tls_program()
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[TLSServer]:
    directory = tmp_path_factory.mktemp("tls")
    with TLSServer(directory, authority, authority.certificate("server")) as server:
        yield server


def url(server: TLSServer, query: str = "", host: str = "127.0.0.1") -> str:
    return f"toc+rediss://{host}:{server.tls_port}/0{query}"


def said(url: str, **kwargs: object) -> str:
    """What a connection that cannot be made says, and to the center's own users as well."""
    connection = Connection(url, **kwargs)
    error = failure(connection, kombu_toc.ServerError)
    assert isinstance(error, connection.connection_errors)
    center = kombu_toc.center_for(url, ssl=kwargs.get("ssl"))
    with pytest.raises(kombu_toc.ServerError):
        center.put("mail", "1", b"x")
    return str(error)


def test_an_authority_of_ones_own_is_named_in_the_url(
    secure: TLSServer, authority: Authority
) -> None:
    round_trip(Connection(url(secure, f"?ssl_ca_certs={authority.file}")))
    places = {"/etc/ssl/shop-ca.pem": f"{authority.file}"}
    places["redis.example.org:6380"] = f"localhost:{secure.tls_port}"
    round_trip(Connection(broker_of("docs/connections.md", "toc+rediss:", places)))


def test_an_authority_of_ones_own_is_named_in_the_transport_options(
    secure: TLSServer, authority: Authority
) -> None:
    round_trip(Connection(url(secure), transport_options={"ssl_ca_certs": authority.file}))


@each(
    ("prefix", "requirement", "scheme"),
    [
        ("", ssl.CERT_REQUIRED, "toc+redis"),
        ("", "required", "toc+rediss"),
        ("ssl_", "CERT_REQUIRED", "toc+redis"),
        ("ssl_", ssl.CERT_REQUIRED, "toc+rediss"),
    ],
)
def test_broker_use_ssl_is_understood_as_celerys_users_write_it(
    secure: TLSServer, authority: Authority, prefix: str, requirement: object, scheme: str
) -> None:
    given = {f"{prefix}ca_certs": authority.file, f"{prefix}cert_reqs": requirement}
    round_trip(Connection(url(secure).replace("toc+rediss", scheme), ssl=given))


@each(
    "query, ssl",
    [
        *(("?ssl_cert_reqs=CERT_NONE", None), ("?ssl_cert_reqs=none", None)),
        *(("", {"ssl_cert_reqs": given}) for given in (ssl.CERT_NONE, "CERT_NONE", None)),
    ],
)
def test_certificates_are_not_checked_if_the_url_says_so(
    secure: TLSServer, query: str, ssl: object
) -> None:
    """Or broker_use_ssl."""
    round_trip(Connection(url(secure, query), ssl=ssl))


@each("ssl", [True, {"ssl_cert_reqs": "required"}])
def test_an_unknown_authority_is_not_trusted(secure: TLSServer, ssl: object) -> None:
    text = said(url(secure), ssl=ssl)
    assert f"127.0.0.1:{secure.tls_port}: the server's certificate is not trusted (" in text
    assert "ssl_ca_certs=/path/ca.pem" in text


def test_another_authority_is_not_trusted(secure: TLSServer, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "other")
    assert "is not trusted" in said(url(secure, f"?ssl_ca_certs={other.file}"))


def test_an_expired_certificate_is_told_for_what_it_is(
    authority: Authority, tmp_path: Path
) -> None:
    with TLSServer(tmp_path, authority, authority.certificate("expired", days=-1)) as server:
        text = said(url(server, f"?ssl_ca_certs={authority.file}"))
        assert "the server's certificate has expired: renew it" in text


@pytest.mark.parametrize("host", [night("127.0.0.1"), "localhost"])
def test_a_certificate_for_another_host_is_told_for_what_it_is(
    authority: Authority, tmp_path: Path, host: str
) -> None:
    certificate = authority.certificate("elsewhere", hosts=["redis.example.org"])
    with TLSServer(tmp_path, authority, certificate) as server:
        query = f"?ssl_ca_certs={authority.file}"
        text = said(url(server, query, host=host))
        assert "the server's certificate is for another host (" in text
        assert "ssl_check_hostname=false does without the check" in text
        round_trip(Connection(url(server, f"{query}&ssl_check_hostname=false", host=host)))


def test_a_clients_certificate_opens_the_door_and_its_lack_is_told(
    authority: Authority, tmp_path: Path
) -> None:
    certificate = authority.certificate("strict")
    with TLSServer(tmp_path, authority, certificate, clients=True) as server:
        query = f"?ssl_ca_certs={authority.file}"
        text = said(url(server, query))
        assert "wants a client's certificate" in text
        assert "ssl_certfile and ssl_keyfile" in text
        file, key = authority.certificate("client")
        round_trip(Connection(url(server, f"{query}&ssl_certfile={file}&ssl_keyfile={key}")))
        stranger = Authority(tmp_path / "stranger", "stranger").certificate("client")
        query += f"&ssl_certfile={stranger[0]}&ssl_keyfile={stranger[1]}"
        assert re.search("(not accept|whether it accepts) this client's", said(url(server, query)))


def test_who_is_between_reads_everything_without_tls_and_nothing_with_it(
    secure: TLSServer, authority: Authority
) -> None:
    with secure.client() as client:
        client.execute_command("ACL", "SETUSER", "anna", "on", ">pa55word", "~*", "+@all")
    for scheme, port in (("redis", secure.port), ("rediss", secure.tls_port)):
        with Proxy(port) as proxy:
            seen = [proxy.drop_replies(text) for text in (b"pa55word", b"order 7")]
            query = f"?ssl_ca_certs={authority.file}" if scheme == "rediss" else ""
            url = f"toc+{scheme}://anna:pa55word@127.0.0.1:{proxy.port}/0{query}"
            center = kombu_toc.center_for(url)
            for _ in range(5):  # what is seen is cut off
                with suppress(redis.ConnectionError):
                    center.put("mail", "1", b"order 7", if_exists="keep")
            assert center.get("1")
            assert [passed.is_set() for passed in seen] == [scheme == "redis"] * 2


def test_a_file_that_is_not_there_is_named(secure: TLSServer, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    text = said(url(secure, f"?ssl_ca_certs={missing}"))
    assert f"ssl_ca_certs {str(missing)!r} cannot be read" in text
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    assert str(garbage) in said(url(secure, f"?ssl_ca_certs={garbage}"))


def test_a_port_without_tls_is_told_for_what_it_is(secure: TLSServer) -> None:
    text = said(f"toc+rediss://127.0.0.1:{secure.port}/0?socket_timeout=0.5")
    assert "no TLS is spoken there (" in text
    assert "use toc+redis://" in text


def test_a_port_with_tls_is_told_for_what_it_is(secure: TLSServer) -> None:
    text = str(failure(Connection(f"toc+redis://127.0.0.1:{secure.tls_port}/0")))
    assert "toc+rediss://" in text


# -- Sentinel over TLS


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[Deployment]:
    """All of it speaks nothing but TLS."""
    options = tls_options(authority, authority.certificate("all"))
    with Deployment(tmp_path_factory.mktemp("all"), tls=options) as made:
        yield made


@each("inner", [{"ssl": True}, {"ssl": True, "ssl_cert_reqs": "none"}, "sentinel_ssl"])
def test_master_and_sentinels_speak_tls(
    deployment: Deployment, authority: Authority, inner: object
) -> None:
    target, options = deployment.toc_url, {}
    if inner == "sentinel_ssl":
        target += f"&ssl=true&sentinel_ssl=true&ssl_ca_certs={authority.file}"
        round_trip(Connection(target))
        return
    options = {"master_name": NAME, "sentinel_kwargs": inner}
    round_trip(Connection(target, ssl={"ssl_ca_certs": authority.file}, transport_options=options))


def test_a_sentinel_that_speaks_tls_is_told_for_what_it_is(
    deployment: Deployment, authority: Authority
) -> None:
    text = said(deployment.toc_url)
    assert "sentinel_ssl=true" in text
    text = said(f"{deployment.toc_url}&ssl=true&sentinel_ssl=true")
    assert "certificate is not trusted" in text


def test_a_client_in_node_checks_the_certificate_and_logs_in(
    secure: TLSServer, authority: Authority, tmp_path: Path
) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no Node.js")
    rights = "on >p:w ~toc:{toc}:* ~toc:{node-reminders:* +@all -@dangerous"
    secure.client().execute_command("ACL", "SETUSER", "node", *rights.split())
    protocol = tmp_path / "protocol.json"
    with protocol.open("wb") as file:
        nursery.run([sys.executable, "-m", "kombu_toc.scripts"], check=True, stdout=file)

    def remind(login: str, **trusted: str) -> tuple[str, str]:
        ended = subprocess.run(
            ["node", NODE / "remind.js", protocol, f"rediss://{login}localhost:{secure.tls_port}"],
            env={**os.environ, **trusted},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return ended.stdout, ended.stderr

    trusted = {"NODE_EXTRA_CA_CERTS": str(authority.file)}
    assert remind("node:p%3Aw@", **trusted) == ("reminded: order 42\n", "")
    assert "WRONGPASS" in remind("node:other@", **trusted)[1]
    assert "certificate" in remind("node:p%3Aw@")[1]
