"""Checks what is to be published: the sdist and the wheel in a folder, which must be all it has.

    python -m build --outdir dist && python .ci/check_package.py dist

Both must have every file of both packages and the license, the wheel nothing else; its page on an
index must link to the project, and have no relative links. Either is
installed into a new virtual environment without any extra. There, away from this checkout, every
module is imported, and every script is loaded. The wheel's commands say what they do; then it is
installed with the extra ``http`` and Django, and shows the page.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kombu_toc", "celery_toc")

#: What else an sdist must have; pip builds a wheel from it where nobody has a wheel.
BESIDE = {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"}


def main() -> int:
    dist = Path(sys.argv[1])
    [sdist], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    _has(sdist, names, expected | BESIDE)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [about_it] = (name for name in names if name.endswith(".dist-info/METADATA"))
        _links(wheel, email.message_from_bytes(archive.read(about_it)))
    about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    _has(wheel, names, expected)
    if not any(name.endswith("/LICENSE") for name in about):
        raise SystemExit(f"{wheel.name} has no LICENSE")
    if surplus := names - about - expected:
        raise SystemExit(f"{wheel.name} has what is not of a package: {sorted(surplus)}")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder)
        python = Path(folder, "bin", "python")
        # With the pip that is here: another one takes seconds to install.
        install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
        install += ("--disable-pip-version-check", "--no-compile")
        for built, options in ((sdist, ()), (wheel, ("--force-reinstall", "--no-deps"))):
            _run(*install, *options, built.resolve(), cwd=folder)
            _run(python, "-I", ROOT / ".ci" / "check_installed.py", cwd=folder)
        _run(python, "-I", "-m", "celery", "toc", "--help", cwd=folder, stdout=subprocess.DEVNULL)
        _run(*install, f"{wheel.resolve()}[http]", "Django", cwd=folder)
        _run(python, "-I", ROOT / ".ci" / "check_page.py", cwd=folder)
    return 0


def _has(archive: Path, names: set[str], expected: set[str]) -> None:
    if missing := expected - names:
        raise SystemExit(f"{archive.name} lacks {', '.join(sorted(missing))}")


def _links(wheel: Path, metadata: Message) -> None:
    """The package page must link to the project, and its links must lead somewhere from there."""
    named = {url.partition(",")[0] for url in metadata.get_all("Project-URL", [])}
    if missing := {"Source", "Documentation", "Issues", "Changelog"} - named:
        raise SystemExit(f"{wheel.name} has no Project-URL for {', '.join(sorted(missing))}")
    if relative := re.findall(r"\]\((?!https?://|#)[^)]*\)", str(metadata.get_payload())):
        raise SystemExit(f"{wheel.name}: PyPI cannot resolve {', '.join(relative)}")


def _run(*command: object, **how: object) -> None:
    if code := subprocess.run([str(part) for part in command], **how).returncode:
        raise SystemExit(code)  # it has said why


if __name__ == "__main__":
    sys.exit(main())
