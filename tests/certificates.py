"""Certificates for tests, made by the openssl program: it is where a server with TLS is."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .ports import free_port
from .servers import Server, program


@cache
def tls_program() -> str:
    """A server that speaks TLS: the one to test with, or one that is installed.

    Skips the test if there is none.
    """
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program, which makes the certificates")
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
        self.directory, self.name = directory, name
        directory.mkdir(exist_ok=True)
        self._openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30"),
            *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),  # Python 3.13 insists
        )
        self.file = str(directory / f"{name}.pem")

    def certificate(
        self, name: str, *, hosts: str = "IP:127.0.0.1,DNS:localhost", days: int = 30
    ) -> tuple[str, str]:
        """Files of a certificate and its key.

        hosts: as OpenSSL writes them
        days: for which it is valid; -1 for one that has expired
        """
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={hosts}\nauthorityKeyIdentifier=keyid\n")
        self._openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{self.name}.pem"),
            *("-CAkey", f"{self.name}.key", "-CAcreateserial", "-out", f"{name}.pem"),
            *("-days", str(days), "-extfile", extensions.name),
        )
        return str(self.directory / f"{name}.pem"), str(self.directory / f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(
            ["openssl", *arguments], cwd=self.directory, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
