"""The key of a message: the customer, the tenant, the order that it is about.

Scripts know it encoded, so that it can stand among a message's traits.
"""

from __future__ import annotations

import hashlib
import uuid
from functools import lru_cache
from urllib.parse import quote, unquote

from ..errors import TraitError

#: Characters of an encoded key; a longer one is kept as its SHA-256.
MAX_ENCODED = 200

#: What the name of a key begins with that was too long.
_HASHED = "h."


def key_of(what: str, value: object) -> str:
    """A key from a header or an argument, as text; empty for none.

    what: which message it is of, for an error

    Raises TraitError for what is no text, no whole number and no UUID.
    """
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, (str, int, uuid.UUID)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass  # as below
    raise TraitError(f"{what}: the key must be text, a whole number or a UUID, not {value!r}")


@lru_cache(maxsize=4096)
def encode_key(key: str) -> str:
    """A key as scripts know it: of letters, digits and ``_ . % -`` only, 200 at most."""
    data = key.encode("utf-8", "surrogatepass")
    encoded = quote(data, safe="").replace("~", "%7E")
    if len(encoded) > MAX_ENCODED:
        return _HASHED + hashlib.sha256(data).hexdigest()
    return encoded


def is_hashed(encoded: str) -> bool:
    """Whether it looks like what stands for a key that was too long."""
    return encoded.startswith(_HASHED) and len(encoded) == len(_HASHED) + 64


def decode_key(encoded: str) -> str:
    """A key as its sender named it; of one that was too long, what stands for it."""
    return unquote(encoded, errors="replace")
