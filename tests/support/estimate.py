"""How many tests a run has, and roughly how long they take."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

#: Seconds that a test of a folder takes beside others, until a run has measured its file.
SECONDS = {
    "unit": 0.05,
    "meta": 0.2,
    "contract": 0.5,
    "engines": 0.5,
    "e2e": 3.0,
    "pools": 3.0,
    "chaos": 20.0,
}

_CACHED = "toc/seconds"


class Estimate:
    """Said when the tests are collected; measured while they run, and kept in pytest's cache."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cache = getattr(config, "cache", None)  # -p no:cacheprovider
        self._said = False
        self._measured: dict[str, list[float]] = {}

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> str:
        return self.said([item.nodeid for item in items], 1)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self._said:
            self._said = True
            processes = int(self._config.getoption("numprocesses") or 1)
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(self.said(ids, processes))

    def said(self, ids: Iterable[str], processes: int) -> str:
        known = self._cache.get(_CACHED, {}) if self._cache else {}
        files = [id.partition("::")[0] for id in ids]
        seconds = sum(known.get(file) or SECONDS.get(_folder(file), 1.0) for file in files)
        minutes = seconds / processes / 60
        about = (
            f"{minutes:.0f} minutes" if minutes >= 1.5 else f"{max(minutes * 60, 1):.0f} seconds"
        )
        return f"{len(files)} tests, about {about}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self._measured.setdefault(report.nodeid.partition("::")[0], [])
        if report.when == "call":
            seconds.append(0.0)
        if seconds:
            seconds[-1] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._cache:
            means = {file: sum(all) / len(all) for file, all in self._measured.items() if all}
            self._cache.set(_CACHED, {**self._cache.get(_CACHED, {}), **means})


def _folder(file: str) -> str:
    return file.removeprefix("tests/").partition("/")[0]
