"""Python programs forked from a process that has imported what they import.

    nursery.Popen([sys.executable, "-m", "celery", ...], cwd=..., env=..., stdout=...)

takes what :class:`subprocess.Popen` takes, and is one: the program is a child of this process, with
its own pid, exit code and pipes. Only its start is another. A nursery is a second interpreter that
has imported the modules of such a program, and has made no thread, no connection and no app. It
forks, and the fork runs the program as ``python -m`` does, with the arguments, environment, folder
and files that are asked for. A worker is ready in a quarter of the time.

The text of ``-c`` and a file come from one as well. A program is executed as usual if no nursery
fits it: other modules, another interpreter, gevent and eventlet, another value of an environment
variable that an interpreter reads when it starts (LD_PRELOAD, PYTHONHASHSEED, ...). Tests that are
about the start itself use subprocess.Popen. TOC_TEST_EXEC=1 has everything executed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import platform
import queue
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

#: What each server of the API and of the page has imported; the page's templates are compiled too.
SERVER = (
    *("kombu_toc.http.page", "kombu_toc.http.serving", "kombu_toc.library.opening", "jinja2"),
    *("httptools", "uvicorn.protocols.http.httptools_impl", "uvicorn.loops.asyncio"),
    *("uvicorn.lifespan.off", "uvicorn.lifespan.on", "encodings.idna", "encodings.unicode_escape"),
)

#: What workers and Celery's commands have imported.
CELERYS = (
    *("kombu_toc.transport.transport", "celery.__main__", "celery.bin.celery", "celery.app"),
    *("celery.backends.redis", "celery.loaders.app", "celery.app.builtins", "celery.app.amqp"),
    *("celery.app.control", "celery.events.state", "celery.app.log", "celery.app.events"),
    *("celery_toc.app.revoke", "celery_toc.compat.sending", "sqlalchemy.dialects.sqlite"),
)

#: What each kind of program has imported by the time it works. A worker's own list is without
#: celery.worker.consumer and what imports it: with these, the step of the timeout center is added
#: another way (celery_toc/plugin.py). The programs of kombu_toc know nothing of Celery.
PRELOADED = {
    "kombu_toc": (
        *("kombu_toc.transport.transport", "kombu_toc.http.__main__", "kombu_toc.notify.__main__"),
        *("kombu_toc.notify.notifier", "kombu_toc.notify.posting", "aiohttp", *SERVER),
        *("sqlalchemy.dialects.sqlite", "sqlalchemy.ext.asyncio"),
    ),
    "celery": (
        *(*CELERYS, "celery_toc.cli.session", "celery_toc.cli.web", "celery_toc.web.schedules"),
        *("celery_toc.web.tasks", "celery_toc.aio", *SERVER),
    ),
    "worker": (
        *(*CELERYS, "celery.apps.worker", "celery.worker.components", "celery.worker.request"),
        *("celery.worker.strategy", "celery.worker.autoscale", "celery.worker.pidbox"),
        *("celery.concurrency.prefork", "celery.concurrency.solo", "celery.concurrency.thread"),
        *("celery.app.trace", "celery.app.routes", "billiard.heap", "billiard.sharedctypes"),
        *("celery.worker.heartbeat", "celery.worker.loops", "celery_toc.beat.sync"),
        *("celery_toc.worker.failures", "celery_toc.worker.pool", "celery_toc.worker.schedules"),
        *("billiard.popen_fork", "encodings.idna"),
    ),
}

#: Environment variables that an interpreter, or the C library, reads when it starts.
_AT_THE_START = re.compile("PYTHON|LD_|LC_|LANG|TZ|MALLOC_|GLIBC_|FAKETIME")

#: Those that Celery, billiard and aiohttp read when they are imported: a nursery has imported them.
_WHEN_IMPORTED = ("REMAP_SIGTERM", "AUTOSCALE_KEEPALIVE", "MP_LOG", "SSL_CERT_FILE", "SSL_CERT_DIR")

#: The environment of this process when it started, which its nurseries have too, whatever a test
#: sets before the first program is forked.
_OWN = dict(os.environ)

#: Those of them that a fork is given afterwards, and those that make no difference to it.
_GIVEN = ("PYTHONPATH", "PYTHONWARNINGS", "PYTHONUNBUFFERED")
_NOTHING = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")

_WARNINGS = ("ignore", "error", "default", "always", "")


class Popen(subprocess.Popen):
    """A program that is forked from a nursery, or executed if none fits; see above."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        (close_fds, pass_fds, cwd, env, _, _, shell, *pipes) = rest[:13]
        *others, start_new_session = rest[13:19]
        environment = dict(os.environ if env is None else env)
        kind = None
        if not (executable or preexec_fn or pass_fds or shell or rest[19:20] not in ((), (-1,))):
            plain = close_fds and others == [True, None, None, None, -1]
            kind = kind_of(args, environment) if plain else None
        if kind is None:
            super()._execute_child(args, executable, preexec_fn, *rest)
            return
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        folder = os.fspath(os.getcwd() if cwd is None else cwd)
        given = (p2cread, c2pwrite, errwrite)
        files = [number if fd == -1 else fd for number, fd in enumerate(given)]
        try:
            os.stat(os.path.join(folder, ""))  # as an error of who asks
            self.pid = nursery(kind).fork(
                [os.fspath(word) for word in args if word != sys.executable],
                folder,
                environment,
                bool(start_new_session),
                files,
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)


def run(
    args: list[Any],
    *,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **how: Any,
) -> subprocess.CompletedProcess[Any]:
    """As subprocess.run, with a program that is forked."""
    if capture_output:
        how["stdout"] = how["stderr"] = subprocess.PIPE
    with Popen(args, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def done(
    words: Iterable[Any],
    *,
    code: int = 0,
    execute: bool = False,
    environment: Mapping[str, str] | None = None,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with that exit code, and what it has said.

    words: what follows the interpreter
    execute: whether its start is a new program's, and not a fork's
    environment: is added to this process's
    how: as of subprocess.run
    """
    how = {"cwd": ROOT, "env": {**os.environ, **(environment or {})}, "timeout": 120, **how}
    start = subprocess.run if execute else run
    made = start([sys.executable, *words], capture_output=True, text=True, **how)
    assert made.returncode == code, (made.stdout, made.stderr)
    return made


def importing(folder: Path) -> dict[str, str]:
    """The environment of programs that import what is in a folder."""
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


@contextlib.contextmanager
def running(
    words: Iterable[Any], log: Path, *, execute: bool = False, **how: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that writes into a file, and is ended with the block.

    words: what follows the interpreter
    execute: whether its start is a new program's, and not a fork's
    how: as of subprocess.Popen
    """
    with open(log, "wb") as out:
        start = subprocess.Popen if execute else Popen
        process = start([sys.executable, *words], stdout=out, stderr=out, **how)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


class Program:
    """A program that says on its standard error how it goes, and is ended with the block.

    words: what follows the interpreter; environment: is added to this process's
    begun: a text of the line that says that it has begun
    said: the lines that were waited for, and in the end all
    """

    def __init__(self, words: Iterable[str], environment: Mapping[str, str], begun: str) -> None:
        self.process = Popen(
            [sys.executable, *words],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.said: list[str] = []
        # All the time: it would stand still once a pipe is full.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.wait_for(begun, 120)
        except BaseException:
            self.end(signal.SIGKILL)
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.put(line.rstrip())
        self.lines.put("")  # it has ended

    def wait_for(self, text: str, timeout: float = 30) -> str:
        """The next line that has this text."""
        while True:
            line = self.lines.get(timeout=timeout)
            self.said.append(line)
            if text in line:
                return line
            assert line, f"it has ended: {self.said}"

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(timeout=60)
        self._reader.join(10)
        while not self.lines.empty():
            self.said.append(self.lines.get())
        return code


def kind_of(args: Any, environment: dict[str, str]) -> str | None:
    """The nursery that a program can come from; None if it has to be executed."""
    if environment.get("TOC_TEST_EXEC") or isinstance(args, str) or not _can_fork():
        return None
    if any(word in ("gevent", "eventlet") for word in args):
        return None
    at_the_start = filter(_AT_THE_START.match, {*environment, *_OWN} - {*_GIVEN, *_NOTHING})
    if any(environment.get(name) != _OWN.get(name) for name in (*_WHEN_IMPORTED, *at_the_start)):
        return None
    if environment.get("PYTHONWARNINGS", "") not in _WARNINGS:
        return None
    if _module_of(args) in ("kombu_toc.http", "kombu_toc.notify", "kombu_toc.scripts"):
        return "kombu_toc"
    if _module_of(args) == "celery":
        return "worker" if "worker" in args else "celery"
    text = _text_of([os.fspath(word) for word in args])
    if text is None or "gevent" in text or "eventlet" in text:
        return None
    return "celery" if "celery" in text else "kombu_toc"


def _text_of(words: list[str]) -> str | None:
    """Of a program that is given as text, or as a file."""
    if words[0] != sys.executable or len(words) < 2:
        return None
    if words[1] == "-c":
        return words[2]
    return Path(words[1]).read_text() if re.fullmatch(r"/.*\.py", words[1]) else None


def _module_of(args: Any) -> str | None:
    words = [os.fspath(word) for word in args[:3]]
    if words[:1] == [str(CELERY)]:
        return "celery"
    if words[:2] == [sys.executable, "-m"]:
        return words[2]
    return None


#: Celery's own program.
CELERY = Path(sys.executable).with_name("celery")

_SYSTEM_CALL = {"x86_64": 56, "aarch64": 220}.get(platform.machine())


def _can_fork() -> bool:
    return sys.platform == "linux" and _SYSTEM_CALL is not None


class Nursery:
    """A process that has imported modules, and forks programs that are children of this one."""

    def __init__(self, kind: str) -> None:
        self._lock = threading.Lock()
        self._connection, its = socket.socketpair()
        environment = {name: value for name, value in _OWN.items() if name not in _GIVEN}
        with its:
            self._process = subprocess.Popen(
                [sys.executable, __file__, kind, str(its.fileno())],
                pass_fds=[its.fileno()],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
            )

    def fork(
        self,
        words: list[str],
        folder: str,
        environment: dict[str, str],
        session: bool,
        files: list[int],
    ) -> int:
        """Start a program with these three files; returns its pid."""
        asked = json.dumps([words, folder, environment, session]).encode()
        with self._lock:
            socket.send_fds(self._connection, [struct.pack("q", len(asked))], files)
            self._connection.sendall(asked)
            answer = self._connection.recv(8, socket.MSG_WAITALL)
        assert len(answer) == 8, f"a nursery has ended: {self._process.wait(10)}"
        (pid,) = struct.unpack("q", answer)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


_nurseries: dict[tuple[int, str], Nursery] = {}
_making = threading.Lock()


def nursery(kind: str) -> Nursery:
    """The nursery of that kind of this process."""
    key = (os.getpid(), kind)
    with _making:
        if key not in _nurseries:
            _nurseries[key] = Nursery(kind)
        return _nurseries[key]


def close_all() -> None:
    """End the nurseries of this process."""
    for key in [key for key in _nurseries if key[0] == os.getpid()]:
        _nurseries.pop(key).close()


# -- in the nursery


def keep_the_version_of_redis() -> None:
    """redis-py 8 reads it from its installed files for each client, and for each connection."""
    utils = importlib.import_module("redis.utils")
    utils.get_lib_version = functools.cache(utils.get_lib_version)


class _Asked:
    """What one program is to be."""

    def __init__(self, asked: bytes, files: list[int]) -> None:
        self.words, self.folder, self.environment, self.session = json.loads(asked)
        self.files = files

    def become(self) -> None:
        """Have this process look as one that was just executed."""
        for number, file in enumerate(self.files):
            os.dup2(file, number)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                with suppress(OSError):  # that of the folder that was listed
                    os.close(int(name))
        if self.session:
            os.setsid()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._open_files()
        self._warn()

    def _open_files(self) -> None:
        at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            old = getattr(sys, f"__{name}__")
            raw: Any = io.FileIO(number, "wb" if number else "rb", closefd=False)
            raw.name = old.name
            if number == 0:
                raw = io.BufferedReader(raw)
            elif not at_once:
                raw = io.BufferedWriter(raw)
            file = io.TextIOWrapper(
                raw,
                encoding=old.encoding,
                errors=old.errors,
                line_buffering=not at_once and (number == 2 or raw.isatty()),
                write_through=at_once,
            )
            file.mode = "w" if number else "r"
            setattr(sys, name, file)
            setattr(sys, f"__{name}__", file)

    def _warn(self) -> None:
        action: Any = os.environ.get("PYTHONWARNINGS")
        if action:
            sys.warnoptions.append(action)
            warnings.simplefilter(action)

    def run(self) -> None:
        """As an interpreter runs it."""
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        how, *rest = self.words
        first = {"-m": self.folder, "-c": ""}.get(how, os.path.dirname(how))
        sys.path[:1] = [first, *(os.path.abspath(path) for path in paths)]
        importlib.invalidate_caches()
        sys.argv = rest if how == "-m" else [how, *rest[how == "-c" :]]
        if how == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            runpy.run_path(how, run_name="__main__")


def _serve(kind: str, connection: socket.socket) -> _Asked:
    """Fork whenever that is asked for; returns in each fork what it is to be."""
    for name in PRELOADED[kind]:
        with suppress(ModuleNotFoundError):  # of an extra that is not installed
            importlib.import_module(name)
    keep_the_version_of_redis()
    for name in [name for name in sys.modules if name.endswith(".__main__")]:
        del sys.modules[name]  # it is run, and its imports are here
    if {"kombu_toc.http.page", "jinja2"} <= sys.modules.keys():
        page = importlib.import_module("kombu_toc.http.page.presentation").templates()
        for name in page.list_templates(["html"]):
            page.get_template(name)
    scripts = importlib.import_module("kombu_toc.scripts.call")
    for name in scripts.names():
        scripts.load(name)
    _check(connection)
    fork = _forking()
    gc.collect()
    gc.freeze()
    while True:
        head, files, _, _ = socket.recv_fds(connection, 8, 3)
        if not head:
            sys.exit()
        (size,) = struct.unpack("q", head)
        asked = connection.recv(size, socket.MSG_WAITALL)
        pid = fork()
        if pid == 0:
            connection.detach()
            return _Asked(asked, files)
        for file in files:
            os.close(file)
        connection.sendall(struct.pack("q", pid))


def _check(connection: socket.socket) -> None:
    """A fork has no threads of the process that it comes from, and shares its connections."""
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"{len(tasks)} threads"
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            what = os.readlink(f"/proc/self/fd/{name}")
            assert int(name) in (0, 1, 2, connection.fileno()) or "socket:" not in what, what
    if "celery" in sys.modules:
        from celery._state import _get_active_apps

        assert not list(_get_active_apps()), "an app"


def _forking() -> Any:
    """os.fork, but for one thing: the child is one of this process's parent."""
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    # Where the C library keeps the number of a thread, which fork() sets (PR_GET_TID_ADDRESS).
    where = ctypes.c_void_p()
    libc.prctl(40, ctypes.byref(where), 0, 0, 0)
    flags = 0x00008000 | signal.SIGCHLD  # CLONE_PARENT
    if where.value:
        flags |= 0x01000000 | 0x00200000  # CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID
    at = ctypes.c_void_p(where.value)
    last = (at, None) if platform.machine() == "x86_64" else (None, at)
    words = [ctypes.c_long(_SYSTEM_CALL), ctypes.c_long(flags), None, None, *last]
    syscall, python = libc.syscall, ctypes.pythonapi
    before, in_parent, in_child = (
        *(python.PyOS_BeforeFork, python.PyOS_AfterFork_Parent),
        python.PyOS_AfterFork_Child,
    )

    def fork() -> int:
        before()
        pid = syscall(*words)
        if pid:
            in_parent()
            return pid if pid > 0 else -ctypes.get_errno()
        in_child()
        return 0

    return fork


if __name__ == "__main__":
    # A Ctrl-C is for those that were forked; a nursery ends with the process that uses it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _asked = _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
    _asked.become()
    # The last that is done here, and not in a function that catches anything: exit codes,
    # tracebacks and what is called at the end are the interpreter's own.
    _asked.run()
