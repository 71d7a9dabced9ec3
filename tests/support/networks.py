"""Hosts with a network between them that can be parted: network namespaces of this machine.

Nothing of it is in the machine's own network: the bridge has a namespace, too. Servers are reached
by Unix sockets, whatever becomes of the network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from itertools import count
from typing import Any

from .servers import Host

_numbers = count()

#: Where frames go to that are to arrive nowhere.
NOWHERE = "02:00:00:00:00:00"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str:
    """Why this machine makes no network; empty if it does."""
    try:
        Network(1).stop()
    except (OSError, subprocess.CalledProcessError) as exc:
        told = getattr(exc, "stderr", "") or str(exc)
        return f"no network namespaces here: {told.strip()}"
    return ""


class NetworkHost(Host):
    """A host with one address."""

    def __init__(self, namespace: str, address: str, folder: str) -> None:
        self.namespace, self.address, self._folder = namespace, address, folder
        self.enter = ["nsenter", f"--net=/run/netns/{namespace}"]

    def listen(self, port: int) -> list[str]:
        options = ["--bind", self.address, "--protected-mode", "no"]
        return [*options, "--unixsocket", f"{self._folder}/{port}"]

    def reach(self, port: int) -> dict[str, Any]:
        return {"unix_socket_path": f"{self._folder}/{port}"}

    def link(self, is_up: bool) -> None:
        """Plug its cable in, or pull it out."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up" if is_up else "down")

    def lose(self, others: Iterable[Host]) -> None:
        """What it sends to these arrives nowhere, without a word; what they send arrives."""
        for other in others:
            known = (other.address, "lladdr", NOWHERE, "nud", "permanent", "dev", "eth0")
            _ip("-n", self.namespace, "neigh", "replace", *known)

    def refuse(self, others: Iterable[Host]) -> None:
        """It has no route to these, and its programs are told so."""
        for other in others:
            _ip("-n", self.namespace, "route", "replace", "unreachable", other.address)

    def heal(self, others: Iterable[Host]) -> None:
        """Undo all of that."""
        self.link(True)
        for other in others:
            for what in (
                ("neigh", "del", other.address, "dev", "eth0"),
                ("route", "del", "unreachable", other.address),
            ):
                with contextlib.suppress(subprocess.CalledProcessError):  # it was not
                    _ip("-n", self.namespace, *what)


class Network:
    """So many hosts on a bridge."""

    def __init__(self, size: int) -> None:
        self._name = f"toc-{os.getpid()}-{next(_numbers)}"
        self._folder = tempfile.mkdtemp(prefix="toc-net-")  # paths of sockets are short
        self._namespaces: list[str] = []
        self.hosts: list[NetworkHost] = []
        try:
            self._build(size)
        except BaseException:
            self.stop()
            raise

    def _build(self, size: int) -> None:
        bridge = self._add("bridge")
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for number in range(1, size + 1):
            name, port = self._add(str(number)), f"port{number}"
            peer = ("type", "veth", "peer", "name", port, "netns", bridge)
            _ip("-n", name, "link", "add", "eth0", *peer)
            _ip("-n", bridge, "link", "set", port, "master", "br0", "up")
            address = f"10.77.0.{number}"
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            self.hosts.append(NetworkHost(name, address, self._folder))

    def _add(self, what: str) -> str:
        name = f"{self._name}-{what}"
        _ip("netns", "add", name)
        self._namespaces.append(name)
        return name

    def heal(self) -> None:
        for host in self.hosts:
            host.heal(self.hosts)

    def stop(self) -> None:
        for name in self._namespaces:
            _ip("netns", "del", name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.stop()
