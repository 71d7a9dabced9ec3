"""Takes the screens in docs/screens/ from a real run: `python docs/screens.py`.

Starts a server and a worker, has them work for a while, runs ``celery toc`` in a terminal of its
own, and saves what is on it as SVG. Needs celery-toc[embedded] and rich, which draws the SVG.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import random
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

from celery import Celery
from rich.console import Console
from rich.text import Text

from kombu_toc.client.embedded import server_program

HERE = Path(__file__).parent
WIDTH = 120
PORT = 6390

#: Seconds for which there is work before anything is shown: rates are those of the last 15.
WORK = 25


def make_app() -> Celery:
    """A small shop."""
    app = Celery("shop", broker=f"toc+redis://localhost:{PORT}/0")
    app.conf.task_ignore_result = True
    app.conf.timezone = "Europe/Vienna"
    app.conf.task_routes = {"shop.mail.*": {"queue": "mail"}}
    for name in ("shop.cancel_unpaid", "shop.mail.remind", "shop.mail.welcome", "shop.restock"):
        app.task(name=name)(work)
    app.task(name="shop.mail.newsletter", acks_late=True, acks_on_failure_or_timeout=False)(fail)
    return app


def work(number: int) -> None:
    time.sleep(0.002)


def fail(address: str) -> None:
    raise ValueError(f"mailbox unavailable: {address}")


def fill(app: Celery, enough: threading.Event) -> None:
    """Send what a shop sends, some of it due soon, most of it later."""
    dice = random.Random(7)
    for number in range(400):
        app.tasks["shop.cancel_unpaid"].apply_async(
            (1000 + number,), countdown=dice.triangular(60, 3600, 700)
        )
        app.tasks["shop.mail.remind"].apply_async((1000 + number,), countdown=dice.gauss(1500, 200))
    for number in range(3):
        app.tasks["shop.mail.newsletter"].delay(f"user{number}@example.org")
    number = 0
    while not enough.wait(0.02):  # as customers come
        app.tasks["shop.restock"].delay(number)
        app.tasks["shop.mail.welcome"].apply_async((number,), countdown=dice.uniform(0, 5))
        number += 1


def in_a_terminal(words: list[str], environment: dict[str, str]) -> str:
    """What a command writes on a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    process = subprocess.Popen(
        words, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # that is how a terminal ends
        pass
    os.close(master)
    if process.wait():
        raise SystemExit(shown.decode())
    return shown.decode()


def save(name: str, command: str, shown: str) -> None:
    """Keep the last frame of what was shown."""
    frame = shown.rpartition("\x1b[J")[2].removesuffix("\x1b[?25h")
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for line in frame.replace("\r", "").rstrip("\n").splitlines():
        console.print(Text.from_ansi(line))
    path = HERE / "screens" / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    console.save_svg(str(path), title=command)
    print(f"docs/screens/{name}.svg", flush=True)


def main() -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE), "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "COLORTERM", "COLUMNS"):
        environment.pop(name, None)
    celery = [sys.executable, "-m", "celery", "-A", "screens"]
    server = [server_program(), "--port", str(PORT), "--bind", "127.0.0.1", "--appendonly", "yes"]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        log = stack.enter_context(open(Path(directory, "log"), "wb"))

        def start(*words: str) -> None:
            process = subprocess.Popen(
                words, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)

        start(*server, "--dir", directory)
        time.sleep(1)  # it is there in a moment
        start(*celery, "worker", "-c", "2", "-Q", "celery,mail")
        enough = threading.Event()
        while not app.control.ping(timeout=0.5, limit=1):
            pass
        sender = threading.Thread(target=fill, args=(app, enough))
        sender.start()
        stack.callback(sender.join)
        stack.callback(enough.set)
        time.sleep(WORK)
        for name, words in {
            "status": ["status"],
            "top": ["top", "--span", "1h", "--interval", "2", "--count", "10"],
            "list": ["list", "--task", "shop.*", "--state", "scheduled", "--limit", "12"],
            "dead": ["dead", "list"],
        }.items():
            shown = in_a_terminal([*celery, "toc", *words], environment)
            save(name, f"celery -A shop toc {shlex.join(words)}", shown)


app = make_app()

if __name__ == "__main__":
    main()
