"""Messages as the page reads them, without a server."""

from __future__ import annotations

from typing import Any

from kombu_toc import DEAD, Found, pack
from kombu_toc.http import Mask, PageExtras
from kombu_toc.http.messages import DecompressionBudget
from kombu_toc.http.page.presentation import Reader

#: Seconds since the epoch.
NOW = 1_800_000_000.0


def found(body: bytes, error: str = "") -> Found:
    return Found("mail", 0, "id-1", DEAD, 0, 0, body, "rejected", error)


def read(body: bytes, *patterns: str, error: str = "") -> Any:
    reader = Reader(Mask(patterns), PageExtras())
    return reader.read(found(body, error), round(NOW * 1e6), DecompressionBudget())


def envelope(body: bytes, **headers: Any) -> bytes:
    return pack(
        {
            "headers": headers,
            "properties": {},
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "body": body,
        },
        deflate=False,
    )
