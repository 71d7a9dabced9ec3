"""The parts of the notifier that decide: addresses, signatures, what is sent, what becomes of it,
and what may be fetched."""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from typing import Any

import pytest
import redis

from kombu_toc import LIMITS, ConfigurationError, Delivery, EnvelopeError, pack
from kombu_toc.model import scores
from kombu_toc.model.topic import Declaration
from kombu_toc.notify import SecretsFile, new_secret, posting
from kombu_toc.notify import targets as settling
from kombu_toc.notify.message import (
    MAX_EXPANDED,
    MAX_ID,
    Secrets,
    content_of,
    headers_of,
    host_of,
    signature,
    type_of,
    webhook_id,
)
from kombu_toc.notify.posting import Poster, said
from kombu_toc.notify.targets import (
    AGAIN,
    DONE,
    GATHER,
    GONE,
    KEPT,
    LEAST_BACKOFF,
    MAX_BACKOFF,
    MAX_REST,
    MOMENT,
    MOST_BYTES,
    MOST_TURN,
    SAY_EVERY,
    TIMES,
    Addresses,
    AddressRefused,
    Answer,
    Keeper,
    Lane,
    Settler,
    TimeLimit,
    backoff_of,
    judge,
    seconds_of,
    shown,
)

from ..support import nursery
from ..support.cases import each
from ..support.loops import time_that_passes

HOOK = "https://shop.example.com/hook"
NOW = datetime(2026, 1, 31, 9, 30, tzinfo=timezone.utc)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def delivery(
    body: bytes = b"remind", id: str = "order-7", *, birth: str = "pop.1", left: int | None = None
) -> Delivery:
    score = scores.action(1_700_000_000_000_000) if left is None else scores.tried(1, left)
    return Delivery("mail", 0, 0, id, score, body, 16, birth)


# -- the target of a topic


@each(
    "url",
    [
        HOOK,
        "http://127.0.0.1:8000",
        "https://[2001:db8::1]:8443/a?b=c&d=%20",
        "https://xn--bcher-kva.example/~me",
    ],
)
def test_a_target_is_a_url(url: str) -> None:
    assert Declaration.of("mail", target=url).target == url
    assert Declaration.from_json(Declaration.of("mail", target=url).to_json()).target == url


@each(
    "url",
    [
        "ftp://shop.example.com/",
        "shop.example.com/hook",
        "https:///hook",
        "https://shop.example.com:0/",
        "https://shop.example.com:99999/",
        "https://shop.example.com/#part",
        "https://good.example.com\\@evil.example.com/",
        "https://shop.example.com/a b",
        "https://shop.example.com/\r\nx: y",
        "https://b\u00fccher.example/",
        "https://[::1",
        "https://" + "a" * 2000,
        7,
        b"https://shop.example.com/",
    ],
)
def test_what_is_no_target_is_refused_and_the_queue_named(url: object) -> None:
    with pytest.raises(ConfigurationError, match="queue 'mail': target must be a URL"):
        Declaration.of("mail", target=url)


@each("rest", ["", "#part", ":0/", " ", "\u00fc"])
def test_a_target_with_a_password_is_refused_and_the_password_not_told(rest: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        LIMITS["target"].check("target", f"https://me:sesame@shop.example.com{rest}")
    assert "sesame" not in str(raised.value)
    assert "without user, password" in str(raised.value)


# -- which addresses may be connected to


@each(
    "address",
    [
        *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "::", "::1"),  # this machine
        *("10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),  # private
        *("100.64.0.1", "100.100.100.200", "fc00::1", "fd00:ec2::254", "fec0::1"),
        *("169.254.169.254", "168.63.129.16", "192.0.0.192", "fe80::1", "fe80::1%eth0"),  # links
        *("192.0.2.1", "198.18.0.1", "203.0.113.7", "2001:db8::1", "3fff::1"),  # documentation
        *("224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "ff02::1"),  # many
        *("::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:169.254.169.254"),  # one within another
        *("::ffff:0:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
        *("64:ff9b:1::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001::1", "100::1", "4000::1"),
    ],
)
def test_what_is_not_public_is_refused_and_the_way_out_told(address: str) -> None:
    with pytest.raises(AddressRefused, match="is no public address: --allow"):
        Addresses().check(address, encrypted=True)
    with pytest.raises(AddressRefused):
        Addresses(["203.0.113.8", "fd00:1::/64"]).check(address, encrypted=True)


@each(
    "address",
    ["8.8.8.8", "93.184.216.34", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808"],
)
def test_what_is_public_may_be_connected_to_by_tls_only(address: str) -> None:
    if address == "64:ff9b::808":  # 0.0.8.8
        with pytest.raises(AddressRefused):
            Addresses().check(address, encrypted=True)
        address = "64:ff9b::808:808"
    Addresses().check(address, encrypted=True)
    with pytest.raises(AddressRefused, match="give its target a URL with https"):
        Addresses().check(address, encrypted=False)
    Addresses([address]).check(address, encrypted=False)


@each("address", ["2130706433", "0x7f.1", "127.1", "", "localhost"])
def test_what_the_system_might_take_for_an_address_is_refused(address: str) -> None:
    with pytest.raises(AddressRefused, match="is no address"):
        Addresses(["127.0.0.0/8"]).check(address, encrypted=True)


def test_networks_that_are_named_may_be_connected_to_however_they_are_written() -> None:
    allowed = Addresses(["127.0.0.1", "10.1.0.0/16", "::1", "::ffff:192.168.0.0/112"])
    for address in (
        *("127.0.0.1", "::ffff:127.0.0.1", "10.1.255.1", "64:ff9b::a01:101", "::1"),
        *("192.168.0.9", "::ffff:192.168.255.1"),
    ):
        allowed.check(address, encrypted=False)
    for address in ("127.0.0.2", "10.2.0.1", "172.16.0.1", "169.254.169.254"):
        with pytest.raises(AddressRefused):
            allowed.check(address, encrypted=True)


def test_a_network_may_be_named_at_one_port() -> None:
    allowed = Addresses(["127.0.0.1:8000", "[fd00::/64]:8443", "fd01::1"])
    allowed.check("127.0.0.1", 8000, encrypted=False)
    allowed.check("fd00::7", 8443, encrypted=False)
    allowed.check("fd01::1", 80, encrypted=False)
    for address, port in (("127.0.0.1", 8001), ("fd00::7", 443), ("127.0.0.2", 8000)):
        with pytest.raises(AddressRefused, match=f":{port} lets it"):
            allowed.check(address, port, encrypted=True)


@each(
    "network",
    [
        *("10.1.0.1/16", "localhost", "10.1", "", "10.0.0.0/33"),
        *("10.1.0.1:0", "10.1.0.1:70000", "localhost:80", "[fd00::1]:", ":80", "[]:80"),
    ],
)
def test_what_is_no_network_is_refused(network: str) -> None:
    with pytest.raises(ConfigurationError, match="--allow takes an address or a network"):
        Addresses([network])


# -- signatures


def test_the_signature_is_that_of_the_specification() -> None:
    """The same as the library `standardwebhooks` makes."""
    [key] = Secrets([f"* {SECRET}"]).of(HOOK) or ()
    made = signature([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_new_secret_is_another_one_each_time_and_can_be_used() -> None:
    some = {new_secret() for _ in range(100)}
    assert len(some) == 100
    assert all(Secrets([f"* {one}"]).of(HOOK) for one in some)


@each(
    ("line", "targets", "others"),
    [
        ("*", [HOOK, "http://127.0.0.1:1/"], []),
        (
            "https://shop.example.com",
            [HOOK, "https://SHOP.example.com:443/other?x=1", "https://shop.example.com"],
            [
                "https://shop.example.com.evil.com/",
                "http://shop.example.com/",
                "https://shop.example.com:444/",
                "https://a.shop.example.com/",
            ],
        ),
        (
            "https://*.example.com/hooks/*",
            ["https://a.example.com/hooks/1", "https://a.b.example.com/hooks/?q"],
            [
                "https://example.com/hooks/1",
                "https://evil.com/.example.com/hooks/1",
                "https://a.example.com/other",
                "https://evil.com:443/x.example.com/hooks/",
            ],
        ),
        ("https://shop.example.com/hook", [HOOK], [f"{HOOK}s", f"{HOOK}/", f"{HOOK}?a=1"]),
        (
            "https://shop.example.com/hook?key=1",
            [f"{HOOK}?key=1"],
            [HOOK, "https://shop.example.com/hookkkey=1"],
        ),
        ("http://[::1]:8000", ["http://[::1]:8000/x"], ["http://[::2]:8000/x"]),
        (
            "https://shop.example.com/%7Eme/./a/*?b",
            [
                "https://shop.example.com:443/x/../~me/a/?b",
                "https://SHOP.example.com/%7eme/a/%62?b",
            ],
            ["https://shop.example.com/~me/a/../x?b", "https://shop.example.com/~me/a/%2E%2e?b"],
        ),
        ("http://localhost:8000/", ["http://localhost:8000"], ["http://localhost:8000/x"]),
    ],
)
def test_a_line_is_for_the_targets_that_it_names(
    line: str, targets: list[str], others: list[str]
) -> None:
    secrets = Secrets(["", "# remark", f"  {line}\t{SECRET} # of the shop"])
    assert [one for one in targets if not secrets.of(one)] == []
    assert [one for one in others if secrets.of(one)] == []


def test_of_several_lines_the_first_that_fits_counts() -> None:
    other = new_secret()
    secrets = Secrets([f"https://shop.example.com {SECRET}", f"* {other}"])
    assert secrets.of(HOOK) != secrets.of("https://a.example.com/")
    assert secrets.of(HOOK) == Secrets([f"* {SECRET}"]).of(HOOK)


@each(
    ("line", "says"),
    [
        (f"{HOOK} sesame-open", "a secret is whsec_ and 24 to 64 bytes"),
        (f"{HOOK} whsec_sesameopen", "a secret is whsec_ and 24 to 64 bytes"),
        (f"{HOOK} {SECRET} whsec_" + "sesame" * 30, "a secret is whsec_ and 24 to 64 bytes"),
        (HOOK, "a line is a target and its secrets"),
        (f"{HOOK} {SECRET}" + f" {SECRET}" * 8, "a target has 8 secrets at most, not 9"),
        (f"shop.example.com {SECRET}", "a target is a URL, a part of one"),
        (f"https://me@shop.example.com {SECRET}", "a target is a URL, a part of one"),
    ],
)
def test_a_line_that_makes_no_sense_is_named_and_no_secret_told(line: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Secrets([f"* {SECRET}", line], "secrets.txt")
    assert str(raised.value).startswith(f"secrets.txt, line 2: {says}")
    assert "sesame" not in str(raised.value) and SECRET[8:] not in str(raised.value)


def test_secrets_show_nothing_of_themselves() -> None:
    assert repr(Secrets([f"* {SECRET}"])) == "<Secrets of 1 targets>"


def test_secrets_that_make_no_sense_any_more_leave_those_that_were_read(tmp_path: Path) -> None:
    path = tmp_path / "secrets.txt"
    path.write_text(f"* {SECRET}\n")
    kept = SecretsFile(path)
    path.write_text("* nonsense\n")
    with pytest.raises(ConfigurationError, match="line 1"):
        kept.refresh()
    assert kept.secrets.of(HOOK)
    assert not kept.refresh()  # it is told once


def test_secrets_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOC_NOTIFY_SECRETS", f"{HOOK} {SECRET}\nhttps://b.example.com {SECRET}")
    assert SecretsFile(None).secrets.of("https://b.example.com/x")


# -- leases


async def test_after_a_standstill_a_message_is_sent_only_if_its_lease_is_known_to_last() -> None:
    """Also if it stood still while it renewed others."""
    later, asked, answers = time_that_passes(), [], [True]

    class Center:
        async def extend(self, messages: list[Delivery], _: float) -> list[Delivery]:
            asked.append([one.id for one in messages])
            if asked == [["slow"]]:
                later[0] += 20  # the process stands still
            if not answers[0]:
                raise ConnectionError("away")
            return [one for one in messages if one.id == "lost"]

    keeper = Keeper(Center(), 30)  # type: ignore[arg-type]
    keeping = asyncio.create_task(keeper.run())
    assert await keeper.has(delivery(id="sure"))
    assert asked == []
    keeper.hold(delivery(id="slow"))
    while not asked:
        later[0] += 1
        await asyncio.sleep(0.001)
    for _ in range(3):
        await asyncio.sleep(0)
    assert asked == [["slow"]]
    assert await keeper.has(delivery(id="kept"))
    assert not await keeper.has(delivery(id="lost"))
    answers[0] = False
    assert not await keeper.has(delivery(id="unknown"))
    assert asked == [["slow"], ["kept"], ["lost"], ["unknown"]]
    keeping.cancel()


async def test_after_a_standstill_new_leases_are_renewed_at_once_too() -> None:
    """They may be as old as the others."""
    later, asked = time_that_passes(), []
    loop = asyncio.get_running_loop()

    class Center:
        async def extend(self, messages: list[Delivery], _: float) -> list[Delivery]:
            asked.extend((one.id, loop.time()) for one in messages)
            return []

    keeper = Keeper(Center(), 30)  # type: ignore[arg-type]
    keeping = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)
    began = loop.time()
    keeper.hold(delivery(id="new"))
    later[0] += 20  # the process stands still
    while not asked:
        await asyncio.sleep(0.001)
    keeping.cancel()

    [(id, at)] = asked
    assert id == "new"
    assert at < began + 20 + 30 / TIMES  # not with the next beat


# -- settling


def test_what_could_not_be_settled_because_the_process_stood_still_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    passed, acked = list[list[float]](), []

    class Center:
        async def ack(self, messages: list[Delivery]) -> None:
            [later] = passed
            if not later[0]:
                later[0] += 1000
                raise redis.TimeoutError("no reply within 10 seconds")
            acked.extend(messages)

    async def run() -> None:
        passed.append(time_that_passes())
        await Settler(Center(), 30).ack(delivery())  # type: ignore[arg-type]

    asyncio.run(run())  # by its clock, for longer than the loop of a test may turn
    assert [message.id for message in acked] == ["order-7"]
    # Not others: asyncio tells what tests before have left as soon as it is collected.
    assert [one for one in caplog.records if one.name == settling.logger.name] == []


@pytest.mark.parametrize("how", ["ack", "release", "reject"])
async def test_whatever_goes_wrong_when_a_message_is_settled_nothing_hangs(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Center:
        async def fail(self, *_: Any, **__: Any) -> None:
            raise ConfigurationError("no such thing")

        ack = release = reject = fail

    settler = Settler(Center(), 600)  # type: ignore[arg-type]
    for _ in range(2):  # the next one, too
        await asyncio.wait_for(getattr(settler, how)(delivery()), 60)
    assert [record.getMessage() for record in caplog.records] == [
        "1 messages that were sent are sent again when their leases end: no such thing"
    ] * 2


# -- what is sent


@each(
    ("body", "kind"),
    [
        (b'{"order": 7}', "application/json"),
        (b"[1, 2]", "application/json"),
        (b"{order: 7}", "text/plain; charset=utf-8"),
        (b"remind", "text/plain; charset=utf-8"),
        (b"", "text/plain; charset=utf-8"),
        (b"\xff\x00", "application/octet-stream"),
        (b'{"specversion": "1.0", "id": "e-1"}', "application/cloudevents+json"),
        (b"[" * 100_000, "text/plain; charset=utf-8"),
        (b"[" + b"1," * (1 << 19) + b"1]", "application/json"),
        (b"[" * (1 << 21), "application/octet-stream"),
    ],
    ids=[
        *("object", "array", "almost", "text", "nothing", "bytes", "event", "deep"),
        *("large", "large-almost"),
    ],
)
def test_bytes_are_sent_as_they_are_with_a_type_that_fits(body: bytes, kind: str) -> None:
    assert type_of(body) == kind
    assert content_of(delivery(body)) == (body, kind, {}, None)


def _packed(*, deflate: bool = False, kind: object = "text/plain", **headers: object) -> bytes:
    message = {
        "headers": headers,
        "properties": {},
        "content-type": kind,
        "content-encoding": "utf-8",
        "body": b"remind" * 50,
    }
    return pack(message, deflate=deflate, id="order-7")


@pytest.mark.parametrize("deflate", [False, True])
def test_of_an_envelope_its_body_is_sent_and_the_context_of_its_trace(deflate: bool) -> None:
    raw = _packed(deflate=deflate, traceparent="00-1-2-01", tracestate="a=1", authorization="no")
    body, kind, along, target = content_of(delivery(raw))
    assert body == b"remind" * 50
    assert kind == "text/plain; charset=utf-8"
    assert along == {"traceparent": "00-1-2-01", "tracestate": "a=1"}
    assert target is None


def test_no_header_of_a_message_brings_another_one_along() -> None:
    raw = _packed(kind="text/plain\r\nx-evil: 1", traceparent="00\r\nx-evil: 1", tracestate=7)
    assert content_of(delivery(raw))[1:3] == ("application/octet-stream", {})


@each("raw", [b'{"h":1}', b"\x01\x02\x03", b"\x02", b'{"h":{}}\nx'])
def test_what_only_looks_like_an_envelope_is_sent_as_it_is(raw: bytes) -> None:
    assert content_of(delivery(raw)).body == raw


def test_what_is_compressed_and_becomes_too_large_is_not_sent() -> None:
    message = {"headers": {}, "body": b"x" * (MAX_EXPANDED + 1)}
    with pytest.raises(EnvelopeError, match="expands to more"):
        content_of(delivery(pack(message, deflate=True)))


def test_a_message_may_name_its_own_target() -> None:
    raw = _packed(**{"x-target": "https://b.example.com/"})
    assert content_of(delivery(raw)).target == "https://b.example.com/"
    for refused in ("file:///sesame", f"{HOOK}?key=sesame\r\n", "https://me:sesame@shop/", 7):
        with pytest.raises(ConfigurationError, match="the header x-target must be a URL") as raised:
            content_of(delivery(_packed(**{"x-target": refused})))
        assert "sesame" not in str(raised.value)


def test_each_attempt_has_the_same_id_and_a_later_message_of_that_id_another() -> None:
    first = webhook_id(delivery())
    assert first.startswith("order-7_")
    assert webhook_id(delivery(birth="pop.1~pop.2", left=15)) == first
    assert webhook_id(delivery(birth="pop.1;v30000,x5!9", left=15)) == first
    assert webhook_id(delivery(birth="pop.2")) != first
    assert webhook_id(delivery()._replace(slot=3)) != first  # by another slot basis
    assert webhook_id(delivery(birth="pop.3;i0.pop.1,v9~pop.4")._replace(slot=3)) == first
    assert webhook_id(delivery(birth="pop.3;v9,i0.pop.1,p1")._replace(slot=7)) == first
    assert webhook_id(delivery()._replace(topic="sms")) != first


@each("id", ["a.b.c", "\u00fc", "a\r\nb", "a" * 1000, "\udc80", "a b\x00", ""])
def test_any_id_makes_a_header_without_dots(id: str) -> None:
    """A dot separates id, time and body in what is signed."""
    made = webhook_id(delivery(id=id))
    assert made.isascii() and made.isprintable()
    assert " " not in made and "." not in made
    assert len(made) <= MAX_ID + 40


def test_the_headers_of_an_attempt() -> None:
    one = delivery(b"{}", left=14)
    keys = Secrets([f"* {SECRET}"]).of(HOOK) or ()
    made = headers_of(one, content_of(one), keys, 1_700_000_000)
    assert made == {
        "content-type": "application/json",
        "webhook-id": webhook_id(one),
        "webhook-timestamp": "1700000000",
        "webhook-signature": signature(keys, webhook_id(one), 1_700_000_000, b"{}"),
        "toc-queue": "mail",
        "toc-id": "order-7",
        "toc-failures": "2",
    }
    assert "webhook-signature" not in headers_of(one, content_of(one), (), 1)


# -- what becomes of it


@each("status", [200, 201, 202, 204, 299])
def test_what_is_taken_is_done(status: int) -> None:
    assert judge(Answer(status), HOOK, NOW).what == DONE


@each("status", [199, 300, 301, 302, 307, 400, 401, 404, 409, 500, 502, 503])
def test_any_other_answer_is_a_failure_that_is_kept_with_what_was_said(status: int) -> None:
    made = judge(Answer(status, "No", "", b"out of\x1b[31m \xffpaper\n"), f"{HOOK}?key=sesame", NOW)
    assert (made.what, made.backoff, made.rest) == (AGAIN, None, 0.0)
    assert made.reason.startswith(f"HTTP {status}")
    assert made.error.startswith(f"{HOOK}?...: HTTP {status}")
    assert made.error.endswith(" No\nout of\ufffd[31m \ufffdpaper\n")
    assert "sesame" not in made.error


def test_what_a_failure_keeps_and_what_else_there_is() -> None:
    made = judge(Answer(500, "", "", b"x" * 10_000), HOOK, NOW)
    assert made.error == f"{HOOK}: HTTP 500\n" + "x" * KEPT, "the first bytes and no more"
    made = judge("no answer within 15 seconds", HOOK, NOW)
    assert made == (AGAIN, "no answer within 15 seconds", f"{HOOK}: {made.reason}", None, 0.0)
    assert judge(Answer(410), HOOK, NOW).what == GONE, "nothing more is wanted"


@pytest.mark.parametrize("status", [429, 503])
def test_a_target_may_say_when_it_wants_to_be_asked_again(status: int) -> None:
    made = judge(Answer(status, "", "20"), HOOK, NOW)
    assert (made.what, made.backoff, made.rest) == (AGAIN, 20.0, 20.0)
    made = judge(Answer(status, "", "3600"), HOOK, NOW)
    assert (made.backoff, made.rest) == (3600.0, MAX_REST)
    assert judge(Answer(500, "", "20"), HOOK, NOW).backoff is None


@each(
    ("said", "seconds"),
    [
        ("120", 120.0),
        (" 7 ", 7.0),
        ("0", LEAST_BACKOFF),
        ("9" * 400, MAX_BACKOFF),
        ("Sat, 31 Jan 2026 09:31:00 GMT", 60.0),
        ("Sat, 31 Jan 2026 09:31:00 -0000", 60.0),
        ("Sat, 31 Jan 2026 09:29:00 GMT", LEAST_BACKOFF),
        ("Sat, 31 Jan 9999 09:29:00 GMT", MAX_BACKOFF),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("1.5", None),
        ("\u0661", None),
        ("Sat, 31 Jan 2026 09:31:00 +99999999999999", None),
        ("Sat, 31 Jan 99999 09:31:00 GMT", None),
        ("Mon, 01 Jan 0001 00:00:00 +2359", LEAST_BACKOFF),
    ],
)
def test_when_that_is(said: str, seconds: float | None) -> None:
    assert seconds_of(said, NOW) == seconds


def test_without_a_back_off_of_its_queue_a_message_waits_longer_each_time() -> None:
    assert [backoff_of(n, 5.0, 600.0) for n in range(5)] == [5.0, 10.0, 20.0, 40.0, 80.0]
    assert backoff_of(31, 5.0, 600.0) == 600.0
    assert backoff_of(10_000, 5.0, 600.0) == 600.0
    assert backoff_of(3, 5.0, 0.0) == 5.0


def test_a_target_is_shown_without_what_may_be_secret() -> None:
    assert shown("https://shop.example.com:444/a/b?key=sesame") == (
        "https://shop.example.com:444/a/b?..."
    )


# -- what may be fetched


def test_a_lane_with_room_may_be_fetched_for_at_once() -> None:
    lane = Lane("mail", HOOK, 8)
    assert (lane.room, lane.ready_at()) == (8, -inf)
    for _ in range(6):
        lane.begin(5.0)
    assert lane.ready_at() <= 5.0  # a quarter is left
    lane.begin(5.0)
    assert lane.ready_at() == 5.0 + GATHER  # a moment, so that a fetch is worth while
    lane.begin(5.0)
    assert (lane.room, lane.ready_at()) == (0, inf)


def test_a_lane_that_was_left_out_says_when_it_has_room() -> None:
    lane, rung = Lane("mail", HOOK, 2), list[str]()
    lane.on_room = lambda: rung.append("bell")
    lane.begin(1.0)
    lane.begin(1.0)
    lane.end()
    assert not rung
    lane.begin(1.0)
    lane.left_out = True
    lane.end()
    assert rung == ["bell"]


def test_a_lane_with_many_bytes_under_way_has_no_room() -> None:
    lane = Lane("mail", HOOK, 8)
    lane.begin(1.0, MOST_BYTES - 1)
    assert lane.room == 7
    lane.begin(1.0, 100)
    assert (lane.room, lane.ready_at()) == (0, inf)
    lane.end(100)
    assert lane.room == 7


async def test_what_is_expanded_waits_until_others_have_left_memory_for_it() -> None:
    lane, begun, sent = Lane("mail", HOOK, 8), [], [asyncio.Event() for _ in range(4)]

    async def send(number: int) -> None:
        async with lane.expanding() as tell:
            begun.append(number)
            tell(MOST_BYTES // 2)
            await sent[number].wait()

    tasks = [asyncio.create_task(send(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert begun == [0, 1]
    assert lane.room == 0  # nor is anything else fetched
    tasks[2].cancel()
    sent[1].set()
    await tasks[1]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert begun == [0, 1, 3]
    for one in sent:
        one.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert lane.room == 8


def test_a_lane_rests_and_a_closed_one_is_never_fetched_for() -> None:
    lane, rung = Lane("mail", HOOK, 8), list[str]()
    lane.on_room = lambda: rung.append("bell")
    assert lane.wants(0.0)
    lane.rest(30.0)
    lane.rest(20.0)
    assert (lane.ready_at(), lane.wants(29.9), lane.wants(30.0)) == (30.0, False, True)
    lane.close()
    assert (lane.ready_at(), lane.wants(99.0)) == (inf, False)
    assert len(rung) == 3  # a fetch that waits for it ends


def test_a_target_that_fails_is_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kombu_toc.notify")
    lane = Lane("mail", f"{HOOK}?key=sesame", 8)
    for number in range(100):
        lane.failed("HTTP 500\nforged line", 1.0 + number / 10, dead=number % 2 == 1)
    lane.failed("HTTP 502", 1.0 + SAY_EVERY, dead=False)
    assert [record.getMessage() for record in caplog.records] == [
        "queue mail: its target does not take messages (1 failed, 0 of them dead now): "
        "HTTP 500 forged line",
        "queue mail: its target does not take messages (101 failed, 50 of them dead now): HTTP 502",
    ]
    caplog.clear()
    lane.worked()
    lane.worked()
    assert [record.getMessage() for record in caplog.records] == [
        f"queue mail: {HOOK}?... takes messages again"
    ]


# -- the address of each connection


def test_a_name_that_leads_elsewhere_when_it_is_connected_to_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it resolved to when somebody looked at it before does not matter."""

    found = {"shop.example.com": ["127.0.0.1"], "both.example.com": ["::ffff:127.0.0.1", "0.0.0.0"]}

    def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
        return [
            (
                socket.AF_INET6 if ":" in one else socket.AF_INET,
                *(socket.SOCK_STREAM, 6, ""),
                (one, port, 0, 0) if ":" in one else (one, port),
            )
            for one in found[host]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]

        async def run() -> list[Any]:
            async with Poster(Addresses(["192.168.0.1"]), 10) as poster:
                return [
                    await poster.post(f"https://{name}:{port}/", {}, b"x")
                    for name in (*found, "127.0.0.1", "[::1]")
                ]

        for answer in asyncio.run(run()):
            assert isinstance(answer, str)
            assert "is no public address" in answer
        with pytest.raises(BlockingIOError):
            server.accept()


class _Names:
    """Looks up names. Those that begin with ``hangs`` take until they are told to go on, and there
    are none of these."""

    def __init__(self) -> None:
        self.asked: queue.Queue[str] = queue.Queue()
        self.goes_on = threading.Semaphore(0)

    def __call__(self, host: str, port: int, **_: object) -> list[Any]:
        self.asked.put(host)
        if host.startswith("hangs"):
            self.goes_on.acquire(timeout=60)
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


async def test_names_that_hang_do_not_delay_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a few threads then."""

    names = _Names()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    monkeypatch.setattr(posting, "LOOKUPS", 2)
    monkeypatch.setattr(posting, "SLOW_LOOKUPS", 1)
    monkeypatch.setattr(posting, "SLOW", 0.0)
    async with Poster(Addresses(), 60) as poster:

        def ask(host: str) -> asyncio.Task[Any]:
            return asyncio.create_task(poster.post(f"https://{host}:1/", {}, b"x"))

        async def asked() -> str:
            return await asyncio.to_thread(names.asked.get, timeout=30)

        first = [ask("hangs-1"), ask("hangs-2")]
        assert {await asked(), await asked()} == {"hangs-1", "hangs-2"}
        names.goes_on.release(2)
        assert {await one for one in first} == {"its name cannot be resolved: no such name"}
        again = [ask("hangs-1"), ask("hangs-2")]
        await asked()
        for number in range(3):
            assert "is no public address" in await ask(f"works-{number}")
            assert await asked() == f"works-{number}"
        names.goes_on.release(2)
        await asyncio.gather(*again)


def test_a_name_that_hangs_does_not_keep_the_process_from_ending() -> None:
    text = """
import asyncio, socket, time
from kombu_toc.notify.targets import Addresses
from kombu_toc.notify.posting import Poster

async def run():
    async with Poster(Addresses(), 0.1) as poster:
        print(await poster.post("https://hangs/", {}, b"x"))

socket.getaddrinfo = lambda *_, **__: time.sleep(600)
asyncio.run(run())
"""
    assert nursery.done(("-c", text), execute=True).stdout == "no answer within 0.1 seconds\n"


async def _posted(serve: Any, number: int, timeout: float = 10, path: str = "/") -> list[Any]:
    """What is made of the answers to so many requests, one after the other, to a target that
    serves its connections so."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}"
    async with Poster(Addresses(["127.0.0.1"]), timeout) as poster:
        answers = [await poster.post(url, {}, b"x") for _ in range(number)]
    server.close()
    return answers


async def test_a_kept_connection_that_was_closed_meanwhile_costs_no_attempt() -> None:
    """A server may close one just when it is used again."""
    served, tasks = [], []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        for _ in range(1 if len(served) < 2 else 100):
            try:
                await reader.readuntil(b"\r\n\r\nx")
            except asyncio.IncompleteReadError:
                break
            served.append(writer.get_extra_info("peername"))
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            await writer.drain()
        # It is closed when the next request has been read, and not answered.
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\nx")
        writer.close()
        await writer.wait_closed()

    answers = await _posted(serve, 3)
    await asyncio.gather(*tasks)
    assert [answer.status for answer in answers] == [204, 204, 204]
    assert len(set(served)) == 3


def _answers(reply: bytes, *, timeout: float = 10, ends: bool = True) -> Any:
    """What is made of these bytes as the answer to a request.

    ends: whether the connection is closed behind them
    """

    async def run() -> Any:
        done = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\nx")
            writer.write(reply)
            if not ends:
                await done.wait()
            writer.close()

        [answer] = await _posted(serve, 1, timeout, "/hook?key=sesame")
        done.set()
        return answer

    return asyncio.run(run())


_BEGUN = b"HTTP/1.1 %d Said\r\nretry-after: 7\r\ncontent-length: 100\r\n\r\nout of paper"


@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_that_breaks_off_counts_by_what_has_come(ends: bool) -> None:
    """Its status, and its first bytes; also if it never ends."""
    assert _answers(_BEGUN % 200, ends=ends) == Answer(200)
    made = _answers(_BEGUN % 503, ends=ends, timeout=0.5)
    assert made == Answer(503, "Said", "7", b"out of paper")


def _answer_after_a_standstill(answers: Callable[[Callable[[], None], socket.socket], None]) -> Any:
    """What is made of the answer to a request that may take ten seconds.

    answers: is called in a thread when the request has come, with a function after which the
        process has stood still for a hundred seconds, and the connection
    """

    async def run() -> Any:
        loop, later = asyncio.get_running_loop(), time_that_passes()

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                got = b""
                while not got.endswith(b"\r\n\r\nx"):
                    got += connection.recv(65536)
                begun, ended = threading.Event(), threading.Event()

                def stand_still() -> None:
                    begun.set()
                    ended.wait(60)
                    later[0] += 100

                loop.call_soon_threadsafe(stand_still)
                begun.wait(60)
                answers(ended.set, connection)
                ended.set()
                connection.recv(1)  # until the other end closes it

        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(asyncio.to_thread(serve))
            async with Poster(Addresses(["127.0.0.1"]), 10) as poster:
                url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
                answer = await poster.post(url, {}, b"x")
            await serving
        return answer

    return asyncio.run(run())


@each(
    ("reply", "answer"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", Answer(204)),
        (_BEGUN % 200, Answer(200)),
        (_BEGUN % 503, Answer(503, "Said", "7", b"out of paper")),
    ],
    ids=["whole", "begun", "failed"],
)
def test_what_has_come_when_the_time_is_over_counts_although_it_was_not_read(
    reply: bytes, answer: Answer
) -> None:
    """The process stood still, and finds the answer and the end of the time together."""

    def answers(go_on: Callable[[], None], connection: socket.socket) -> None:
        connection.sendall(reply)
        go_on()

    assert _answer_after_a_standstill(answers) == answer


def test_a_target_has_time_after_a_standstill_too() -> None:
    """It may have stood still itself, or what it has sent may have to be sent again."""

    def answers(go_on: Callable[[], None], connection: socket.socket) -> None:
        go_on()
        time.sleep(0.2)  # far longer than the request lasts if it ends with its time
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    assert _answer_after_a_standstill(answers) == Answer(204)


@pytest.mark.parametrize("over", [0.0, MOMENT], ids=["just-then", "a-moment-later"])
async def test_what_is_read_when_the_time_is_over_is_not_lost(over: float) -> None:
    """The loop reads it and sees that the time is over in one and the same turn.

    over: seconds for which the time has been over
    """
    now = [0.0]
    found = b""
    loop = asyncio.get_running_loop()
    loop.time = lambda: now[0]  # type: ignore[method-assign]
    got: asyncio.Future[bytes] = loop.create_future()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.add_reader(ours, lambda: got.done() or got.set_result(ours.recv(100)))
        with TimeLimit(10):
            now[0] += 10
            for _ in range(5 if over else 0):  # several turns of the loop
                await asyncio.sleep(0)
            now[0] += over
            theirs.send(b"answer")
            found = await got
        loop.remove_reader(ours)
    assert found == b"answer"


async def test_a_request_that_is_cancelled_is_not_one_that_took_too_long() -> None:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(asyncio.CancelledError), TimeLimit(60):
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.sleep(60)


def test_an_answer_that_takes_a_message_and_never_ends_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kombu_toc.notify.posting.MAX_DRAIN", 0.05)
    began = time.monotonic()
    assert _answers(_BEGUN % 200, ends=False, timeout=600) == Answer(200)
    assert time.monotonic() - began < 300


def test_nothing_of_a_queue_with_a_rate_makes_up_for_a_moment_of_standing_still() -> None:
    lane = Lane("mail", HOOK, 10)
    assert [lane.turn(1.0), lane.turn(1.0)] == [0.0, 0.0]  # without a rate
    lane.terms = lane.terms._replace(spacing=0.25)
    assert [lane.turn(1.0), lane.turn(1.25), lane.turn(1.5)] == [0.0, 0.0, 0.0]
    # What was to be sent then is all due at once.
    assert [lane.turn(5.0), lane.turn(5.0), lane.turn(5.0)] == [0.0, 0.25, 0.5]
    assert lane.turn(5.25) == 0.5


def test_a_rate_that_was_a_slow_one_holds_nothing_up_when_it_is_another() -> None:
    lane = Lane("mail", HOOK, 10)
    lane.terms = lane.terms._replace(spacing=3600.0)
    assert lane.turn(1.0) == 0.0
    lane.terms = lane.terms._replace(spacing=0.25)
    assert [lane.turn(2.0), lane.turn(3.25)] == [MOST_TURN, 0.0]


async def test_a_host_that_messages_name_leaves_room_to_others() -> None:
    lane = Lane("mail", HOOK, 8)
    begun: list[str] = []
    ends: dict[str, asyncio.Event] = {}

    async def send(host: str, name: str) -> None:
        lane.begin(0.0)
        async with lane.hosts.visit(host, lane.limit):
            begun.append(name)
            await ends.setdefault(name, asyncio.Event()).wait()
        lane.end()

    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    slow = [asyncio.create_task(send("slow", f"slow-{n}")) for n in range(6)]
    await settle()
    assert begun == ["slow-0", "slow-1"]
    assert (lane.under_way, lane.hosts.waiting, lane.room) == (6, 4, 6)
    other = asyncio.create_task(send("other", "other"))
    await settle()
    assert begun[2:] == ["other"]
    ends["slow-1"].set()  # they go on in their order
    await settle()
    assert begun[3:] == ["slow-2"]
    slow[3].cancel()  # who waits no more holds up nobody
    ends["slow-0"].set()
    await settle()
    assert begun[4:] == ["slow-4"]
    lane.close()
    await settle()
    assert begun[5:] == ["slow-5"]
    for one in ends.values():
        one.set()
    await asyncio.gather(*slow, other, return_exceptions=True)
    assert (lane.hosts.waiting, lane.under_way) == (0, 1)  # the one that was cancelled
    ends.clear()
    more = asyncio.create_task(send("slow", "more"))
    await settle()
    assert begun[-1] == "more"
    more.cancel()


@pytest.mark.parametrize("deflate", [False, True])
def test_the_host_that_a_message_names_is_known_before_it_is_expanded(deflate: bool) -> None:
    def host(headers: dict[str, Any], body: bytes = b"x" * 100_000) -> str:
        packed = pack({"headers": headers, "body": body}, deflate=deflate, id="order-7")
        return host_of(delivery(packed))

    assert host({"x-target": "https://Shop.example.com:8443/hook?x"}) == "shop.example.com:8443"
    assert host({"x-target": 7}) == host({}) == host({"to": HOOK}, b'"x-target"') == ""
    assert host({"x-target": "https://[x/"}) == ""
    assert host_of(delivery(b'{"x-target": "https://shop.example.com"}')) == ""
    assert host_of(delivery(b"\x01nonsense")) == ""


_BADLY = {
    "204": b"HTTP/1.1 204 No Content\r\ncontent-length: 2\r\n\r\nok",
    "204-in-chunks": b"HTTP/1.1 204 X\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "204-unsaid": b"HTTP/1.1 204 X\r\n\r\nok",
    "204-at-last": b"HTTP/1.1 204 X\r\nconnection: close\r\n\r\n<p>ok</p>\n",
    "204-behind-103": b"HTTP/1.1 103 X\r\nlink: </>\r\n\r\n"
    b"HTTP/1.1 204 X\r\ncontent-length: 2\r\n\r\nok",
    "304": b"HTTP/1.1 304 X\r\ncontent-length: 2\r\n\r\nok",
    "too-long": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nok",
    "none-said": b"HTTP/1.1 201 OK\r\ncontent-length: 0\r\n\r\nok",
    "no-chunk": b"HTTP/1.1 202 OK\r\ntransfer-encoding: chunked\r\n\r\nok",
    "no-chunk-500": b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\nok",
}


@each("split", ["whole", "body-apart", "bytes"])
@each("name", _BADLY)
async def test_the_status_counts_whatever_comes_behind_the_headers(name: str, split: str) -> None:
    """And the body of one answer is never taken for the next one."""

    reply, served = _BADLY[name], []
    status = int(reply[9:12] if name != "204-behind-103" else b"204")
    head, end, body = reply.partition(b"\r\n\r\n")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\nx")
                served.append(name)
                parts = {"whole": [reply], "body-apart": [head + end, body]}
                for part in parts.get(split, [reply[n : n + 1] for n in range(len(reply))]):
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()

    answers = await _posted(serve, 4)
    assert [getattr(answer, "status", answer) for answer in answers] == [status] * 4


@each(
    "reply",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxy",
        b"",
    ],
    ids=["nonsense", "long", "many", "two-lengths", "nothing"],
)
def test_what_is_no_answer_is_told_without_what_the_url_may_have_that_is_secret(
    reply: bytes,
) -> None:
    answer = _answers(reply)
    assert isinstance(answer, str)
    assert "sesame" not in answer
    assert answer.startswith(("its answer is not HTTP: ", "the connection was closed without"))


def test_any_other_error_is_told_without_that_too() -> None:

    target = f"{HOOK}?key=sesame"
    assert said(ValueError(f"bad: {target}"), target) == f"ValueError: bad: {HOOK}?..."
    assert said(ValueError("bad: /hook?key=sesame"), target) == "ValueError: bad: /hook?..."
    assert said(ValueError("bad"), HOOK) == "ValueError: bad"


def test_nothing_of_aiohttp_is_loaded_before_it_is_needed() -> None:
    text = "import sys, kombu_toc.notify, kombu_toc.http; print('aiohttp' in sys.modules)"
    assert nursery.done(("-c", text), execute=True).stdout == "False\n"
