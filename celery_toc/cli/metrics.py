"""``celery toc metrics``: what Prometheus reads."""

from __future__ import annotations

import click

from .exits import FAILED, PARTIAL, USAGE, Command, Failure
from .session import Session, with_session


class _Address(click.ParamType):  # type: ignore[type-arg]  # Click's is generic from 8.5 on
    """``host:port``, ``:port`` for all addresses of the machine, ``port`` for its loopback."""

    name = "address"

    def convert(
        self,
        value: str | tuple[str, int],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        host, colon, port = value.rpartition(":")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            self.fail(f"{value!r} is not an address; write HOST:PORT, or :9808", param, ctx)
        if not host:
            return ("0.0.0.0" if colon else "127.0.0.1"), int(port)
        return host.removeprefix("[").removesuffix("]"), int(port)


@click.command(
    cls=Command,
    example="""
celery -A shop toc metrics
celery -A shop toc metrics --serve :9808
celery -A shop toc metrics --serve 127.0.0.1:9808
""",
)
@click.option(
    "--serve",
    "address",
    type=_Address(),
    metavar="[HOST]:PORT",
    help="Serve them over HTTP at this address until Ctrl-C; without HOST, at all addresses.",
)
@with_session
def metrics(session: Session, address: tuple[str, int] | None) -> None:
    """Queue depths, counters and lateness in Prometheus's text format.

    Without --serve they are printed once. One exporter is enough for any number of workers:
    everything is read from Redis.
    """
    try:
        from ..integrations import prometheus as exporter
    except ImportError as exc:
        raise Failure(
            f"{exc}: this command needs prometheus-client; pip install 'celery-toc[metrics]'",
            USAGE,
        ) from exc
    session.center.client.ping()  # fails at once if the broker is down
    if session.as_json or address is None:
        registry = exporter.registry(session.center)
        samples = [sample for family in registry.collect() for sample in family.samples]
        if session.as_json:
            session.screen.json(
                [
                    {"name": one.name, "labels": one.labels, "value": float(one.value)}
                    for one in samples
                ]
            )
        else:
            click.echo(exporter.metrics_text(session.center), nl=False)
        for one in samples:
            if one.name == "celery_toc_slots_missing":
                where = "{topic!r} at {server}".format(**one.labels)
                session.complain(f"no answer from {one.value:.0f} slots of {where}", PARTIAL)
        return
    host, port = address
    try:
        server, thread = exporter.serve(session.center, host, port)
    except OSError as exc:
        raise Failure(f"cannot serve at {host}:{port}: {exc.strerror or exc}", FAILED) from exc
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"Serving metrics at http://{shown}:{server.server_port}/metrics", err=True)
    try:
        thread.join()
    except KeyboardInterrupt:  # the way to end it
        server.shutdown()
