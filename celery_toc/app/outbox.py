"""Tasks that are sent with the caller's transaction: :func:`kombu_toc.outbox`."""

from kombu_toc import outbox as outbox
