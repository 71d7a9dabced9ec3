"""Registers the URL schemes. Imports nothing heavy, never raises.

Kombu has no entry-point group for transports. It does load the group ``kombu.serializers`` the
first time that anything is serialized, published or consumed, and Celery cannot open a connection
without it. This package has an entry point in that group, and loading it registers the schemes.
Kombu then registers the entry point's value as a serializer. A value is required; it has no encoder
and no decoder, and is never used.

A program that makes a bare ``kombu.Connection`` before it imports anything else of Kombu has to
``import kombu_toc`` first.
"""

from __future__ import annotations

_TRANSPORT = "kombu_toc.transport.transport:Transport"

#: Kinds of URLs: the part between ``toc+`` and ``://``.
KINDS = ("redis", "rediss", "unix", "sentinel", "cluster", "embedded")

#: Arguments of ``kombu.serialization.register``: encoder, decoder, content type.
SERIALIZER = (None, None, "application/x-toc")


def register() -> None:
    """Make ``toc://`` and ``toc+...://`` known to Kombu."""
    try:
        from kombu.transport import TRANSPORT_ALIASES
    except Exception:  # a Kombu that this package cannot work with: its own error is clearer
        return
    TRANSPORT_ALIASES.setdefault("toc", _TRANSPORT)
    for kind in KINDS:
        # Kombu cuts a URL at the first '+', but its failover uses the whole scheme.
        TRANSPORT_ALIASES.setdefault(f"toc+{kind}", _TRANSPORT)


register()
