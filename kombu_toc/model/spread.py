"""Where the row of a message lies in a task library: the *spread* is a number that picks its table.

The spread of a message with a business id is made of that, and its token ends with it: so whoever
knows the message knows where its row is. The spread of any other is made of its id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .topic import checksum_of

#: The header with the business id of a task.
BIZ_ID = "x-biz-id"

#: Hexadecimal digits of a token that are its own, and behind them those of a business id. No other
#: token has as many.
OWN, SPREAD = 8, 5
_LENGTH = OWN + SPREAD


def spread_of_biz(biz_id: str) -> int:
    """The spread of what has this business id."""
    return checksum_of(biz_id) & ((1 << 4 * SPREAD) - 1)


def spread_of(id: str, token: str) -> int:
    """The spread of a message."""
    if len(token) == _LENGTH:
        try:
            return int(token[OWN:], 16)
        except ValueError:
            pass  # another client's
    return checksum_of(id)


def has_biz(token: str) -> bool:
    """Whether a token says a business id."""
    return len(token) == _LENGTH


def token_with(token: str, headers: Mapping[str, Any]) -> str:
    """The token of a message with these headers, of one that has any number of digits."""
    biz_id = headers.get(BIZ_ID)
    if biz_id is None:
        return token
    return f"{token[:OWN]}{spread_of_biz(str(biz_id)):0{SPREAD}x}"
