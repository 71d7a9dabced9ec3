"""A worker and a producer over TLS: on time, at least once, and after its connections are cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.certificates import Authority, TLSServer, tls_program
from ..support.tasks import make_app
from ..support.workers import LOOPS, POOLS, Journal, StartWorkers, wait_until


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    tls_program()
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def secure(tmp_path: Path, authority: Authority) -> Iterator[TLSServer]:
    """It lets in only whom the authority knows."""
    certificate = authority.certificate("server")
    server = TLSServer(tmp_path, authority, certificate, clients=True).start()
    yield server
    server.stop()


@pytest.mark.parametrize("pool", LOOPS)
def test_a_worker_whose_broker_speaks_tls_works_on_after_its_connections_are_cut(
    pool: str,
    secure: TLSServer,
    authority: Authority,
    start_workers: StartWorkers,
    journal: Journal,
) -> None:
    """TLS reads whole records: a reply may be there although no socket shows it."""
    file, key = authority.certificate("client")
    url = f"toc+rediss://127.0.0.1:{secure.tls_port}/0"
    certificates = {"ssl_ca_certs": authority.file, "ssl_certfile": file, "ssl_keyfile": key}
    settings = {"broker_use_ssl": certificates}
    start_workers(1, *POOLS[pool], broker=url, **settings)
    with make_app(url, "disabled://", **settings) as app, secure.client() as client:
        for when in ("before", "after"):
            for number in range(30):
                # At once, all together, and one by one; some larger than a record of TLS.
                app.tasks["e2e.note"].apply_async(
                    (f"{when}-{number}",),
                    countdown=(0.0, 0.5, number / 40)[number % 3],
                    headers={"padding": "x" * 50_000 if number % 10 == 0 else ""},
                )
            journal.wait_for(f"{when}-", 30)
            wait_until(lambda: not [*client.scan_iter("toc:{celery:*}:body")])
            client.client_kill_filter(_type="normal", skipme=True)
        runs = journal.runs()
        assert len(runs) == 60
        assert set(runs.values()) == {1}
        wait_until(lambda: len(app.control.ping(timeout=1)) == 1)
