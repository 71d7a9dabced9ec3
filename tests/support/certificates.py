"""Certificates for tests, and servers that have them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path

import pytest
import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

from .ports import free_port
from .servers import Server, program


@cache
def tls_program() -> str:
    """A server that speaks TLS: the one to test with, or one that is installed.

    Skips the test if there is none.
    """
    for name in (program(), "redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is None:
            continue
        # Without a certificate it ends; one that was built without TLS says so before.
        command = [found, "--port", "0", "--tls-port", "1"]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if "Failed to configure TLS" in tried.stdout + tried.stderr:
            return found
    pytest.skip("no server that speaks TLS: apt-get install redis-server")


class TLSServer(Server):
    """A server that speaks TLS on a port of its own, beside the plain one that tests look at.

    tls_port: where
    """

    def __init__(
        self,
        directory: Path,
        authority: Authority,
        certificate: tuple[str, str],
        *options: str,
        clients: bool = False,
    ) -> None:
        """clients: whether they must show a certificate"""
        self.tls_port = free_port()
        super().__init__(directory, *tls_options(authority, certificate, clients=clients), *options)
        self.options += ("--tls-port", str(self.tls_port))

    def program(self) -> str:
        return tls_program()


class OnlyTLS:
    """Makes a server that speaks nothing but TLS of a kind of server."""

    def program(self) -> str:
        return tls_program()

    def ports(self) -> list[str]:
        return ["--port", "0", "--tls-port", str(self.port)]

    def client(self, db: int = 0) -> redis.Redis:
        retry = Retry(NoBackoff(), 0)
        options = {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
        return redis.Redis(port=self.port, db=db, protocol=2, retry=retry, ssl=True, **options)


def tls_options(
    authority: Authority, certificate: tuple[str, str], *, clients: bool = False
) -> tuple[str, ...]:
    """Options of a server or a sentinel that has this certificate."""
    return (
        *("--tls-cert-file", certificate[0], "--tls-key-file", certificate[1]),
        *("--tls-ca-cert-file", authority.file),
        *("--tls-auth-clients", "yes" if clients else "no"),
    )


class Authority:
    """Signs certificates; all in one folder."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self._ca = trustme.CA(organization_unit_name=name)
        self.file = str(directory / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def certificate(
        self, name: str, *, hosts: Sequence[str] = ("127.0.0.1", "localhost"), days: int = 30
    ) -> tuple[str, str]:
        """Files of a certificate and its key.

        hosts: names and addresses that it is for
        days: for which it is valid; -1 for one that has expired
        """
        until = datetime.now(timezone.utc) + timedelta(days=days)
        made = self._ca.issue_cert(*hosts, common_name=name, not_after=until)
        files = str(self.directory / f"{name}.pem"), str(self.directory / f"{name}.key")
        made.cert_chain_pems[0].write_to_path(files[0])
        made.private_key_pem.write_to_path(files[1])
        return files
