"""D8: what Prometheus reads, and that the alerts and the dashboard speak of nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import promql_parser
import pytest
import yaml
from celery import Celery
from kombu import pools
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import kombu_toc
from celery_toc import timeout_center
from celery_toc.metrics import TimeoutCenterCollector, metrics_text, serve
from kombu_toc import TimeoutCenter
from kombu_toc.metrics import COUNTERS
from kombu_toc.notify.targets import stop_target

from ..support.cluster import Cluster
from ..support.inspection import put_some
from ..support.ports import free_port
from ..support.servers import Server
from ..support.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"

HOUR = 3600.0


def samples(text: str) -> dict[tuple[str, ...], float]:
    """(name, labels in the order of their names...) -> value"""
    return {
        (one.name, *(value for _, value in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


@pytest.fixture
def busy(center: TimeoutCenter) -> TimeoutCenter:
    """One that has something of everything."""
    center.queues.declare("reply", slots=1, expires=60_000)
    for topic in ("mail", "reply"):
        put_some(center, topic, 6, "", b"x")
    center.put("mail", "later", b"x", delay=HOUR)
    time.sleep(0.1)  # they are to be so late
    messages = center.pop("mail", 4).messages
    center.ack(messages[:2])
    center.reject(messages[2], requeue=False)
    center.metrics.send(center.runner)
    return center


def test_the_exporter_tells_which_targets_are_stopped(center: TimeoutCenter) -> None:
    center.queues.declare("plain")
    for topic in ("mail", "sms"):
        center.queues.declare(topic, target="https://shop.example.com/hook")

    def told() -> dict[str, float]:
        name = "celery_toc_target_stopped"
        return {k[1]: n for k, n in samples(metrics_text(center)).items() if k[0] == name}

    assert told() == {"mail": 0, "sms": 0}
    other = TimeoutCenter(center.client)
    stop_target(other, "sms", "https://shop.example.com/hook", "HTTP 410")
    wait_until(lambda: told() == {"mail": 0, "sms": 1}, 30)


def test_the_exporter_tells_depths_counters_and_lateness(busy: TimeoutCenter) -> None:
    found = samples(metrics_text(busy))
    assert found["celery_toc_up",] == 1
    depths = {key[1]: n for key, n in found.items() if key[0] == "celery_toc_messages"}
    assert depths == {"scheduled": 1, "ready": 2, "in_flight": 1, "dead": 1}
    assert 0.1 <= found["celery_toc_oldest_overdue_seconds", "mail"] < 10
    assert found["celery_toc_slots", "mail"] == 8
    events = {key[1]: n for key, n in found.items() if key[0] == "celery_toc_events_total"}
    assert events == {**dict.fromkeys(COUNTERS, 0), "put": 7, "delivered": 4, "acked": 2, "dead": 1}
    assert found["celery_toc_lateness_seconds_count", "mail"] == 4
    assert 0.4 <= found["celery_toc_lateness_seconds_sum", "mail"] < 10
    assert found["celery_toc_lateness_seconds_bucket", "0.064", "mail"] == 0
    assert found["celery_toc_lateness_seconds_bucket", "+Inf", "mail"] == 4
    assert found["celery_toc_script_calls_total", "put"] == 7
    assert found["celery_toc_script_calls_total", "put_special"] == 6  # those that expire
    # What runs together is counted, and not timed: on a Cluster, the pops of several slots.
    assert found["celery_toc_script_seconds_count", "pop"] == (0 if busy.clustered else 1)


def test_the_buckets_of_the_histogram_double_and_add_up(busy: TimeoutCenter) -> None:
    name = "celery_toc_lateness_seconds_bucket"
    buckets = [
        (float(key[1]), n) for key, n in samples(metrics_text(busy)).items() if key[0] == name
    ]
    assert buckets == sorted(buckets)
    bounds = [bound for bound, _ in buckets[:-1]]
    assert bounds[0] == 0.00025
    for lower, upper in pairwise(bounds):
        assert upper == pytest.approx(2 * lower, rel=1e-4)


def test_queues_that_go_away_by_themselves_are_not_exported(busy: TimeoutCenter) -> None:
    assert "reply" not in metrics_text(busy)


def test_a_topics_name_may_have_any_character(center: TimeoutCenter) -> None:
    name = 'a "b"\\c{d}:1 é'
    center.put(name, "x", b"")
    center.metrics.send(center.runner)
    assert samples(metrics_text(center))["celery_toc_events_total", "put", name] == 1


def test_the_exporter_serves_an_app_and_says_when_its_server_is_down(tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    http = None
    try:
        http, thread = serve(Celery("shop", broker=server.toc_url), "127.0.0.1", 0)

        def scrape() -> dict[tuple[str, ...], float]:
            url = f"http://127.0.0.1:{http.server_port}/metrics"
            with urllib.request.urlopen(url, timeout=30) as answer:
                return samples(answer.read().decode())

        found = scrape()
        assert found.pop(("celery_toc_up",)) == 1
        where = f"127.0.0.1:{server.port}"
        assert found.pop(("celery_toc_memory_used_bytes", where)) > 100_000
        assert found == {
            ("celery_toc_memory_max_bytes", where): 0,
            ("celery_toc_topics_left_out",): 0,
        }
        server.kill()
        assert scrape() == {("celery_toc_up",): 0}
        server.start()
        kombu_toc.center_for(server.toc_url).put("mail", "x", b"")
        assert scrape()["celery_toc_messages", "ready", "mail"] == 1
        http.shutdown()
        thread.join(10)
        assert not thread.is_alive()
    finally:
        if http is not None:
            http.server_close()
        server.stop()


def test_an_app_whose_broker_is_none_of_ours_is_told_so() -> None:
    with pytest.raises(kombu_toc.ConfigurationError, match="not a timeout center"):
        serve(Celery("shop", broker="memory://"), "127.0.0.1", 0)


def test_the_collector_fits_into_a_registry_of_ones_own(busy: TimeoutCenter) -> None:
    registry = CollectorRegistry()
    registry.register(TimeoutCenterCollector(busy))
    assert registry.get_sample_value("celery_toc_up") == 1


# -- the examples


def exposed(text: str) -> dict[str, set[str]]:
    """Metric -> its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, set()).update(one.labels)
    return found


def selectors(expression: Any) -> Iterator[promql_parser.VectorSelector]:
    """The selectors in an expression of PromQL."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("vs", "expr", "lhs", "rhs", "param", "vector_selector"):
        part = getattr(expression, name, None)
        if part is not None:
            yield from selectors(part)
    for part in getattr(expression, "args", None) or ():
        yield from selectors(part)


def check(expression: str, text: str) -> None:
    """Assert that it can be parsed, and asks for nothing that is not exposed."""
    known, values = exposed(text), samples(text)
    asked = list(selectors(promql_parser.parse(expression)))
    assert asked, expression
    # The parser finds as many as a person would.
    assert len(asked) == len(re.findall(r"\bcelery_toc_\w+", expression)), expression
    for selector in asked:
        assert selector.name in known, f"{selector.name} in {expression}"
        for matcher in selector.matchers.matchers:
            assert matcher.name in known[selector.name], f"{matcher.name} in {expression}"
            if matcher.name in ("state", "event", "script"):
                for value in matcher.value.split("|"):
                    there = [key for key in values if key[0] == selector.name and value in key]
                    assert there, f"{value} in {expression}"


def test_the_alerts_can_be_parsed_and_use_what_the_exporter_exposes(busy: TimeoutCenter) -> None:
    [group] = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]
    text = metrics_text(busy)
    names = {rule["alert"] for rule in group["rules"]}
    assert {
        "CeleryTocOverdue",
        "CeleryTocDeadGrowing",
        "CeleryTocLate",
        "CeleryTocNoConsumer",
    } <= names
    assert len(names) == len(group["rules"])
    for rule in group["rules"]:
        check(rule["expr"], text)
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_an_alert_about_a_metric_that_is_not_there_would_be_found(busy: TimeoutCenter) -> None:
    text = metrics_text(busy)
    for wrong in (
        "celery_toc_nothing > 0",
        'celery_toc_messages{queue="mail"} > 0',
        'celery_toc_messages{state="lost"} > 0',
    ):
        with pytest.raises(AssertionError):
            check(wrong, text)


def test_the_configuration_names_the_alerts_and_the_exporters_port() -> None:
    config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    for name in config["rule_files"]:
        assert (EXAMPLES / name).exists()
    [job] = config["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["localhost:9808"]


def test_the_dashboard_uses_what_the_exporter_exposes(busy: TimeoutCenter) -> None:
    board = json.loads((EXAMPLES / "dashboard.json").read_text())
    text = metrics_text(busy)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    for expression in expressions:
        check(expression.replace("$__rate_interval", "1m"), text)
    [topics] = [one for one in board["templating"]["list"] if one["name"] == "topic"]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", topics["query"]["query"]).groups()
    assert label in exposed(text)[metric]


def lost(whole: Any, read: Any, path: str = "") -> Iterator[str]:
    """The paths of what is not in what was read."""
    if isinstance(whole, dict) and isinstance(read, dict):
        for name, value in whole.items():
            yield from lost(value, read.get(name), f"{path}.{name}")
    elif isinstance(whole, list) and isinstance(read, list) and len(whole) == len(read):
        for number, (value, other) in enumerate(zip(whole, read, strict=True)):
            yield from lost(value, other, f"{path}[{number}]")
    elif whole != read:
        yield path


def test_grafanas_own_model_knows_all_that_the_dashboard_says() -> None:
    """Panels, options and queries as Grafana publishes their schemas: what it does not know, or
    takes for something else, is lost."""
    pytest.importorskip("grafana_foundation_sdk", reason="needs Python 3.11")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()

    def lost_of(board: Any) -> list[str]:
        return list(lost(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board)))))

    board = json.loads((EXAMPLES / "dashboard.json").read_text())
    assert lost_of(board) == []
    board["panels"][0]["options"]["colourMode"] = "value"
    board["panels"][1]["targets"][0]["expression"] = "up"
    assert lost_of(board) == [".panels[0].options.colourMode", ".panels[1].targets[0].expression"]


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    board = json.loads((EXAMPLES / "dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.cluster
def test_the_exporter_tells_how_schedules_stand(
    server: Server | Cluster, center: TimeoutCenter
) -> None:
    with Celery("shop", broker=server.toc_url, set_as_current=False) as app:

        @app.task(name="shop.tidy", shared=False)
        def tidy() -> None: ...

        schedules = timeout_center(app).schedules
        for name, every in (("a", 600), ("b", 1200), ("c", 1200)):
            schedules.put(name, "shop.tidy", every)
        schedules.pause("c")
        found = samples(metrics_text(center))
        assert found["celery_toc_schedules", "active", "celery"] == 2
        assert found["celery_toc_schedules", "idle", "celery"] == 1
        assert found["celery_toc_schedules_late", "celery"] == 0
        assert 500 < found["celery_toc_schedule_next_seconds", "celery"] <= 600
        [late] = center.recurring.outlook(late=-900)
        assert (late.schedules, late.active, late.late) == (3, 2, 1)
        schedules.pause("a")
        schedules.pause("b")
        assert ("celery_toc_schedule_next_seconds", "celery") not in samples(metrics_text(center))
    pools.reset()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus")
def test_prometheus_takes_the_configuration_and_answers_the_dashboard(
    busy: TimeoutCenter, server: Server | Cluster, tmp_path: Path
) -> None:
    """Prometheus itself, with the files of the example."""
    board = json.loads((EXAMPLES / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    port = free_port()
    with Celery("shop", broker=server.toc_url, set_as_current=False) as app:
        exporter, thread = serve(app, "127.0.0.1", 0)
        config = (EXAMPLES / "prometheus.yml").read_text()
        config = config.replace("localhost:9808", f"127.0.0.1:{exporter.server_port}")
        (tmp_path / "prometheus.yml").write_text(config.replace("15s", "1s"))
        shutil.copy(EXAMPLES / "alerts.yml", tmp_path)
        words = [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"]
        with open(tmp_path / "log", "wb") as log:
            words = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", *words]
            process = subprocess.Popen(words, stdout=log, stderr=log)

        def ask(path: str, **query: str) -> Any:
            url = f"http://127.0.0.1:{port}/api/v1/{path}?{urlencode(query)}"
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]

        def is_read() -> bool:
            try:
                return bool(ask("query", query="celery_toc_up == 1")["result"])
            except OSError:
                return False

        try:
            wait_until(is_read, 60, (tmp_path / "log").read_text)
            found = ask("query", query='celery_toc_messages{topic="mail",state="dead"}')["result"]
            assert [one["value"][1] for one in found] == ["1"]
            for expression in expressions:
                asked = expression.replace("$__rate_interval", "1m").replace("$topic", ".*")
                assert ask("query", query=asked)["resultType"] == "vector", expression
            [group] = ask("rules")["groups"]
            names = [rule["name"] for rule in group["rules"]]
            assert "CeleryTocOverdue" in names and len(names) == len(set(names))
        finally:
            process.terminate()
            process.wait(60)
            exporter.shutdown()
            thread.join()
            pools.reset()
