"""``result_backend = "toc+redis://..."``: results on the server that the broker is on."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from celery import Celery
from celery.backends.redis import RedisBackend
from celery.exceptions import ImproperlyConfigured

import kombu_toc

from ..support.cases import each
from ..support.servers import Server


def test_the_brokers_url_serves_for_results_too(single_server: Server) -> None:
    """With whatever options of the transport it has."""
    url = f"toc+redis://127.0.0.1:{single_server.port}/1?visibility_timeout=30&socket_timeout=7"
    app = Celery(broker=url, backend=url)
    id = str(uuid.uuid4())
    app.backend.store_result(id, 42, "SUCCESS")
    assert app.AsyncResult(id).get(timeout=5) == 42
    assert isinstance(app.backend, RedisBackend)
    assert app.backend.connparams["db"] == 1
    with single_server.client(1) as client:
        assert client.delete(f"celery-task-meta-{id}") == 1
    app.backend.result_consumer.stop()


def test_the_embedded_server_keeps_results_under_the_same_url(tmp_path: Path) -> None:
    url = f"toc+embedded://{tmp_path}/shop"
    app = Celery(broker=url, backend=url)
    app.backend.set("key", "value")
    assert app.backend.get("key") == b"value"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("toc+cluster://h1:7000,h2:7000", "name one server, redis://host:6379/0"),
        ("toc+sentinel://h1,h2/0?master_name=m", "sentinel://h1:26379/0;sentinel://h2:26379/0"),
        ("toc+redis://h/0?visibilty_timeout=3", "did you mean 'visibility_timeout'"),
    ],
)
def test_where_that_cannot_be_the_error_names_what_can(url: str, said: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=said):
        Celery(backend=url).backend  # noqa: B018


@each(
    ("url", "plain"),
    [
        ("toc://", "redis://localhost:6379/0"),
        ("toc+redis://me:p%2F@h:7000/2", "redis://me:p%2F@h:7000/2"),
        ("toc+redis://[::1]/0?toc_slots=4", "redis://[::1]:6379/0"),
        ("toc+rediss://h/1", "rediss://h:6379/1?ssl_cert_reqs=required"),
        ("toc+redis://h/1?ssl=true", "rediss://h:6379/1?ssl_cert_reqs=required"),
        ("toc+rediss://h/1?ssl_cert_reqs=none&toc_slots=4", "rediss://h:6379/1?ssl_cert_reqs=none"),
        ("toc+unix:///run/a%20b.sock?db=3", "redis+socket:///run/a%20b.sock?virtual_host=3"),
    ],
)
def test_a_brokers_url_as_others_have_it(url: str, plain: str) -> None:
    assert kombu_toc.server_url(url) == plain
