"""Networks that part between real hosts, while ``kombu_toc.verify`` works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .. import partitions
from ..support import networks


@pytest.fixture(autouse=True)
def namespaces(request: pytest.FixtureRequest) -> None:
    if reason := networks.why_not():
        if request.config.getoption("--require-namespaces"):
            pytest.fail(reason)
        pytest.skip(reason)


HEAR = """
import socket, sys
heard = socket.socket(type=socket.SOCK_DGRAM)
heard.bind((sys.argv[1], 7777))
print("ready", flush=True)
print(heard.recv(99).decode(), flush=True)
"""
SAY = "import socket, sys; socket.socket(type=2).sendto(sys.argv[1].encode(), (sys.argv[2], 7777))"


def hear(host: networks.NetworkHost) -> subprocess.Popen[str]:
    command = [*host.enter, sys.executable, "-c", HEAR, host.address]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "ready\n"
    return started


def say(text: str, sender: networks.NetworkHost, receiver: networks.NetworkHost) -> None:
    command = [*sender.enter, sys.executable, "-c", SAY, text, receiver.address]
    subprocess.run(command, check=True)


def test_a_network_is_parted_in_one_direction_until_it_is_healed() -> None:
    with networks.Network(2) as network:
        one, other = network.hosts
        with hear(one) as at_one, hear(other) as at_other:
            one.lose([other])
            say("lost", one, other)
            say("there", other, one)
            assert at_one.communicate(timeout=30)[0] == "there\n"
            network.heal()
            say("healed", one, other)
            assert at_other.communicate(timeout=30)[0] == "healed\n"


def test_a_master_that_is_cut_off_is_replaced_and_what_is_lost_or_doubled_has_a_cause(
    tmp_path: Path,
) -> None:
    """X24"""
    setting = partitions.Setting(1, True)
    outcome = partitions.Parting(tmp_path, "sentinel", setting, 24.0).run(["from all servers"])
    assert (outcome.failovers, outcome.broken) == (1, []), outcome.broken
    assert outcome.runs > 100


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_partitions.py::"
    "test_a_master_that_is_cut_off_is_replaced_and_what_is_lost_or_doubled_has_a_cause"
)
@pytest.mark.parametrize("setting", partitions.SETTINGS, ids=str)
@pytest.mark.parametrize("kind", partitions.KINDS)
def test_whatever_way_a_network_parts_what_is_lost_or_doubled_has_a_cause(
    kind: str, setting: partitions.Setting, tmp_path: Path
) -> None:
    seconds = 15.0 * len(partitions.WAYS)
    outcome = partitions.Parting(tmp_path, kind, setting, seconds).run(partitions.WAYS)
    assert outcome.broken == []
    assert outcome.ways.total() >= len(partitions.WAYS) // 2
