"""The virtual environments of the peers. Standard library only: nothing is installed yet."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent

#: environment -> the Python that it needs, at least
NEEDS = {"toc": (3, 10), "plus": (3, 13), "others": (3, 10)}


class Missing(Exception):
    """An environment cannot be made; the text says what would help."""


def make(name: str, folder: Path) -> Path:
    """Make the environment, unless it is there already; the path of its Python.

    Raises Missing if there is no Python for it.
    """
    directory = folder / "envs" / name
    python = directory / "bin" / "python"
    requirements = HERE / f"requirements-{name}.txt"
    wanted = requirements.read_bytes()
    if name == "toc":
        wanted += (ROOT / "setup.cfg").read_bytes() + bytes(ROOT)
    stamp, digest = directory / ".requirements", hashlib.sha256(wanted).hexdigest()
    if stamp.exists() and stamp.read_text() == digest and _version(str(python)):
        return python
    base = _find(NEEDS[name])
    print(f"Making the environment {name} in {directory}", flush=True)
    subprocess.run([base, "-m", "venv", "--clear", str(directory)], check=True)
    install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    install += ["-r", str(requirements)]
    if name == "toc":
        install += ["--editable", f"{ROOT}[embedded,asyncio,http,notify,postgresql,mysql]"]
    subprocess.run(install, check=True)
    stamp.write_text(digest)
    return python


def versions(python: Path) -> dict[str, str]:
    """What is installed there, and the Python itself."""
    # From a folder without packages: the checkout's would be listed too.
    listed = subprocess.run(
        [str(python), "-c", _LIST], cwd="/", capture_output=True, text=True, check=True
    ).stdout
    return dict(line.split("\t") for line in listed.splitlines())


_LIST = """
import importlib.metadata, platform
print("python", platform.python_version(), sep="\\t")
for found in sorted({(d.name.lower(), d.version) for d in importlib.metadata.distributions()}):
    print(*found, sep="\\t")
"""


def _find(least: tuple[int, int]) -> str:
    for candidate in _candidates():
        version = _version(candidate)
        if version and version >= least:
            return candidate
    wanted = ".".join(map(str, least))
    raise Missing(f"Python {wanted} or later is needed; put one on PATH, or name it with PYTHON")


def _candidates() -> Iterable[str]:
    if "PYTHON" in os.environ:
        yield os.environ["PYTHON"]
    # 3.13 first: one peer needs it, and all are to have the same.
    for minor in (13, 14, 12, 11, 10):
        if found := shutil.which(f"python3.{minor}"):
            yield found
        pyenv = Path.home() / ".pyenv" / "versions"
        yield from (str(path) for path in sorted(pyenv.glob(f"3.{minor}.*/bin/python")))
    yield sys.executable


def _version(python: str) -> tuple[int, int] | None:
    try:
        text = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor = map(int, text.split())
    return major, minor
