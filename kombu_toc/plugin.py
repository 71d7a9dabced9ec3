"""Registers the URL schemes. Imports nothing heavy, never raises.

Kombu has no entry-point group for transports. The group it does load, the first time anything
is serialized, published or consumed, is ``kombu.serializers``; Celery cannot open a connection
without it. So the package has an entry point there, and loading that entry point is what
registers the schemes. Kombu then registers its value as a serializer, which must be given, has
neither an encoder nor a decoder, and is never used.

A program that makes a bare ``kombu.Connection`` before it imports anything else of Kombu writes
``import kombu_toc`` first.
"""

from __future__ import annotations

_TRANSPORT = "kombu_toc.transport.transport:Transport"

#: What may stand between ``toc+`` and ``://``.
KINDS = ("redis", "rediss", "unix", "sentinel", "cluster", "embedded")

#: Arguments of ``kombu.serialization.register``: encoder, decoder, content type.
SERIALIZER = (None, None, "application/x-toc")


def register() -> None:
    """Make ``toc://`` and ``toc+...://`` known to Kombu."""
    try:
        from kombu.transport import TRANSPORT_ALIASES
    except Exception:  # a Kombu so different that nothing here would work: its own error is clearer
        return
    TRANSPORT_ALIASES.setdefault("toc", _TRANSPORT)
    for kind in KINDS:
        # Kombu cuts a URL at the first '+', but its failover uses the whole scheme.
        TRANSPORT_ALIASES.setdefault(f"toc+{kind}", _TRANSPORT)


register()
