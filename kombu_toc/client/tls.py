"""TLS: certificates are checked unless told otherwise, and an error says what to change."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis

from ..errors import ConfigurationError, ServerError

#: How strictly the other end's certificate is checked, as redis-py spells it.
_REQUIREMENTS = ("none", "optional", "required")

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

#: OpenSSL's reasons for not trusting a certificate: x509_vfy.h.
_NOT_YET, _EXPIRED, _WRONG_NAMES = 9, 10, (62, 63, 64)


def read_requirement(value: Any) -> str:
    """How strictly certificates are checked: ``none``, ``optional`` or ``required``.

    value: one of these, or as Python's ssl module and Kombu spell it: ``CERT_NONE``, ssl.CERT_NONE

    Raises ConfigurationError.
    """
    if value is None:
        return "none"
    name = value.name if isinstance(value, ssl.VerifyMode) else str(value)
    name = name.rpartition(".")[2].removeprefix("CERT_").lower()
    if name.isdigit() and int(name) < len(_REQUIREMENTS):
        name = _REQUIREMENTS[int(name)]
    if name not in _REQUIREMENTS:
        raise ConfigurationError(f"ssl_cert_reqs must be required, optional or none, not {value!r}")
    return name


def tls_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of redis-py's TLS connections among these, with strict defaults."""
    found = {k: v for k, v in given.items() if k.startswith("ssl_")}
    found["ssl_cert_reqs"] = read_requirement(found.get("ssl_cert_reqs", "required"))
    if found["ssl_cert_reqs"] == "none":
        found["ssl_check_hostname"] = False
    else:  # False before redis-py 6
        found.setdefault("ssl_check_hostname", True)
    return found


def _ends(exc: BaseException | None, kind: type, words: str) -> bool:
    """Whether an error of this kind, with these words, is among the causes of an error."""
    while exc is not None:
        ours = isinstance(exc, (kind, redis.ConnectionError))
        if ours and re.search(words, str(exc), re.IGNORECASE):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


class TLSConnection(redis.SSLConnection):
    """A TLS connection whose errors say what to change. Raises ServerError if it cannot be
    opened."""

    def connect(self) -> None:
        with self._explained():
            super().connect()

    def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        with self._explained():
            super().connect_check_health(*args, **kwargs)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (redis.ConnectionError, redis.TimeoutError, OSError, ValueError) as exc:
            text = None if isinstance(exc, ServerError) else self.explain(exc)
            if text is None:
                raise
            raise ServerError(f"{self.host}:{self.port}: {text}") from exc

    def explain(self, exc: BaseException) -> str | None:
        """What to change, if an error of opening such a connection says it; it need not be open."""
        missing = [(n, p) for n in _FILES if (p := self._file(n)) and not os.access(p, os.R_OK)]
        if missing:
            return f"{missing[0][0]} {missing[0][1]!r} cannot be read: name a file that can"
        cause: BaseException | None = exc
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        said = str(cause or exc)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return self._distrust(cause)
        if "WRONG_VERSION_NUMBER" in said or _ends(exc, TimeoutError, "handshake"):
            return (
                f"no TLS is spoken there ({said}): use toc+redis:// (for sentinels: no ssl), "
                "or name the TLS port"
            )
        if "CERTIFICATE_REQUIRED" in said or "BAD_CERTIFICATE" in said:
            return (
                "the server wants a client's certificate: give it with ssl_certfile and ssl_keyfile"
            )
        if "ALERT" in said and ("UNKNOWN_CA" in said or "CERTIFICATE" in said):
            return (
                f"the server does not accept this client's certificate ({said}): give another "
                "with ssl_certfile and ssl_keyfile"
            )
        if isinstance(cause, ssl.SSLEOFError):
            cause = None
        if cause is not None and "_ALERT_" not in said:
            files = ", ".join(f"{n} {p!r}" for n in _FILES if (p := self._file(n)))
            return f"TLS fails: {said}" + (f"; see to {files}" if files else "")
        if cause is not None:
            return f"the server refuses TLS: {said}"
        if _ends(exc, OSError, "closed|reset|broken pipe|EOF occurred"):
            # The alert is lost if the server closes before it has read what was sent.
            given = (
                "accepts this client's certificate"
                if self.certfile
                else (
                    "wants a client's certificate: if so, give it with ssl_certfile and ssl_keyfile"
                )
            )
            return f"the server closes the connection ({said}): see whether it {given}"
        return None

    def _file(self, name: str) -> str | None:
        return getattr(self, name.removeprefix("ssl_"), None)

    def _distrust(self, exc: ssl.SSLCertVerificationError) -> str:
        why = exc.verify_message
        if exc.verify_code == _EXPIRED:
            return (
                "the server's certificate has expired: renew it there (if it is not so old, "
                "see to this machine's clock)"
            )
        if exc.verify_code == _NOT_YET:
            return (
                "the server's certificate is not valid yet: see to this machine's clock and "
                "to the server's, or renew it"
            )
        if exc.verify_code in _WRONG_NAMES or "mismatch" in why.lower():
            return (
                f"the server's certificate is for another host ({why}): put a name into the URL "
                "that it has, or have it made for this one; ssl_check_hostname=false does "
                "without the check"
            )
        return (
            f"the server's certificate is not trusted ({why}): name the file of the authority "
            "that signed it, ssl_ca_certs=/path/ca.pem"
        )
