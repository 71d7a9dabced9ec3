"""What is not shown: masks of arguments, errors, results."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from kombu_toc import ConfigurationError
from kombu_toc.http import Mask, PageExtras
from kombu_toc.http.library import shown_record
from kombu_toc.http.messages import DecompressionBudget
from kombu_toc.http.page.presentation import Reader
from kombu_toc.http.tokens import HIDDEN, Masking
from kombu_toc.model.delivery import traits_of
from kombu_toc.model.library import Record

from ..support.cases import each
from ..support.page_messages import envelope, found, read


def parameters(task: str) -> list[str] | None:
    return {"shop.pay": ["order", "card"]}.get(task)


def masking(*patterns: str) -> Masking:
    return Masking(Mask(patterns), parameters)


def test_an_argument_is_hidden_by_its_name_however_it_was_given() -> None:
    mask = masking("CARD", "*token*")
    assert mask.args("shop.pay", [7, "4111-1111", "more"]) == [7, HIDDEN, HIDDEN]
    assert mask.kwargs({"card": "4111", "to": [{"api_Token": 1, "x": 2}]}) == {
        "card": HIDDEN,
        "to": [{"api_Token": HIDDEN, "x": 2}],
    }
    assert mask.text("cannot charge 4111-1111 now") == f"cannot charge {HIDDEN} now"


def test_of_a_task_that_is_not_known_all_that_has_no_name_is_hidden() -> None:
    assert masking("card").args("other", [1, 2]) == HIDDEN
    assert masking("card").args(None, "('4111',)") == HIDDEN
    chain = {"chain": [{"task": "other", "args": [1], "kwargs": {"card": 2, "x": 3}}]}
    assert masking("card").value(chain) == {
        "chain": [{"task": "other", "args": HIDDEN, "kwargs": {"card": HIDDEN, "x": 3}}]
    }


def test_a_star_hides_everything_and_no_mask_nothing() -> None:
    assert masking("*").args("shop.pay", [7]) == HIDDEN
    assert masking("*").kwargs({"a": 1}) == HIDDEN
    assert masking().args("other", [1]) == [1]
    assert masking().headers({"argsrepr": "(1,)"}) == {"argsrepr": "(1,)"}
    assert masking("x").headers({"argsrepr": "(1,)", "x": 1, "y": 2}) == {"x": HIDDEN, "y": 2}


@each(
    "said, patterns",
    [(None, ()), (False, ()), (True, ("*",)), ("card", ("card",)), (["A", "b*"], ("a", "b*"))],
)
def test_a_setting_of_a_mask_is_read(said: Any, patterns: tuple[str, ...]) -> None:
    assert Mask.of(said).patterns == patterns


@each("said", [7, [1], {"a": 1}, [""]])
def test_a_setting_that_makes_no_sense_is_an_error(said: Any) -> None:
    with pytest.raises(ConfigurationError, match="toc_web_mask must be true"):
        Mask.of(said)


def test_a_task_is_read_as_a_call() -> None:
    body = json.dumps([[7, "anna"], {"late": True}, {"chain": None}]).encode()
    shown = read(envelope(body, task="shop.mail", retries=2, **{"x-biz-id": "42"}))
    assert (shown.task, shown.arguments) == ("shop.mail", "7, 'anna', late=true")
    assert (shown.biz, shown.retries, shown.state) == (("", "42"), 2, "dead")


@each("body", [b"\xff\xfe", b"", b"[1, 2", b'{"a": "' + b"x" * 50_000 + b'"}', b"[" * 5000])
def test_whatever_a_message_is_it_is_shown_and_hidden_if_nobody_can_tell(body: bytes) -> None:
    assert read(body).task is None
    for patterns in (("secret",), ("*",)):
        shown = read(envelope(body, task="x", argsrepr="('s3cret',)"), *patterns)
        assert "s3cret" not in str(shown._replace(found=None))


def test_an_error_does_not_tell_what_is_hidden() -> None:
    body = json.dumps({"password": "hunter22", "to": "anna"}).encode()
    shown = read(body, "password", error="Bad\nValueError: hunter22 is weak")
    assert "hunter22" not in str(shown._replace(found=None))
    assert "anna" in shown.arguments


@each(
    "value, said",
    [
        ("pä\"ss'\n\\7", "ValueError: {0!r} is weak"),
        ("pä\"ss'\n\\7", 'at {{"password": {1}}}'),
        ("a b/c&d=é", "GET https://x.example/?p={2} failed"),
        (123, "cvv 123 is wrong"),
        (4111.25, "4111.25"),
        ("k" * 30 + "0123456789", "key kkkkkkkkkkkkkkkkkkkk... is too long"),
        ("-----BEGIN\nMIIEvQIBADANBg\n-----END", "in line 2: MIIEvQIBADANBg"),
        ({"of": ["deep-secret"]}, "deep-secret"),
    ],
)
def test_however_an_error_writes_what_is_hidden_it_is_not_shown(value: Any, said: str) -> None:
    error = said.format(value, json.dumps(value), quote(str(value)))
    body = json.dumps([["anna"], {"password": value}, {}]).encode()
    shown = read(envelope(body, task="x"), "password", error=f"Traceback:\n{error}")
    for part in ("7", "é", "123", "4111", "kkkk", "MIIE", "deep"):
        assert part not in shown.error
    assert shown.error.startswith("Traceback:") and HIDDEN in shown.error


def test_what_only_looks_like_what_is_hidden_is_shown() -> None:
    body = json.dumps({"password": "abc", "pin": 12, "none": None, "is": True}).encode()
    error = "None: line 12: abcdef is True in 12 cases: abc"
    shown = read(body, "password", "pin", "none", "is", error=error)
    assert shown.error == f"None: line 12: abcdef is True in 12 cases: {HIDDEN}"
    assert read(b"the whole text", "password", error="ValueError: the whole text").error == (
        f"ValueError: {HIDDEN}"
    )


@each(
    "result, known, unknown",
    [
        ("paid by 4111-1111", f"paid by {HIDDEN}", HIDDEN),
        ({"card": "4222", "order": "A7"}, {"card": HIDDEN, "order": "A7"}, None),
        ({"order": "of 4111-1111"}, {"order": f"of {HIDDEN}"}, {"order": "of 4111-1111"}),
        (["4111-1111", 7, None, True], [HIDDEN, 7, None, True], [HIDDEN, 7, None, True]),
        ({"all": [{"Card": "4222"}, "4222"]}, {"all": [{"Card": HIDDEN}, HIDDEN]}, None),
        ('{"card": "4222", "n": 1}', f'{{"card": "{HIDDEN}", "n": 1}}', None),
        ('["a"]', '["a"]', f'["{HIDDEN}"]'),
        ("{not json", "{not json", HIDDEN),
        (5, 5, None),
        (8675309, HIDDEN, 8675309),
    ],
)
def test_of_a_result_what_is_hidden_is_not_shown(result: Any, known: Any, unknown: Any) -> None:
    """unknown: without the arguments of the task; None: the same."""
    assert masking().result(result, is_known=False) == result
    assert masking("*").result(result, is_known=True) == HIDDEN
    asked = masking("card", "pin")
    assert asked.result(result, is_known=False) == (known if unknown is None else unknown)
    asked = masking("card", "pin")
    asked.kwargs({"card": "4111-1111", "pin": 8675309})
    assert asked.result(result, is_known=True) == known


def test_headers_and_properties_are_hidden_by_their_names_at_any_depth() -> None:
    inside = {"auth": {"Password": "s3cret-1", "user": "anna"}, "x-biz-id": "s3cret-2", "id": "7"}
    mask = masking("password", "x-biz-id", "id", "*cookie")
    assert mask.headers({**inside, "set-cookie": "s3cret-3"}) == {
        "auth": {"Password": HIDDEN, "user": "anna"},
        "x-biz-id": HIDDEN,
        "id": "7",  # which message it is
        "set-cookie": HIDDEN,
    }
    assert mask.properties({"reply_to": "x", "more": [{"password": "s3cret-4"}]}) == {
        "reply_to": "x",
        "more": [{"password": HIDDEN}],
    }
    assert "s3cret" not in mask.text("s3cret-1 s3cret-2 s3cret-3 s3cret-4")
    assert masking("*").headers(inside) == {"auth": HIDDEN, "x-biz-id": "s3cret-2", "id": "7"}
    assert masking("*").properties({"reply_to": "x"}) == {"reply_to": "x"}


def test_of_a_record_of_the_library_the_arguments_are_not_known() -> None:
    record = Record(
        *("id-1", "t", "mail", "dead", 0, "shop.pay", None, None, {}, 1, None),
        *("shop.CardError: 4111-1111", 0, 0),
    )
    assert shown_record(record)["error"] == "shop.CardError: 4111-1111"
    assert shown_record(record, Mask())["error"] == "shop.CardError: 4111-1111"
    assert shown_record(record, Mask(["card"]))["error"] == f"shop.CardError: {HIDDEN}"
    assert shown_record(record, masking("card"))["error"] == f"shop.CardError: {HIDDEN}"


@each(
    "error, said",
    [
        ("", ""),
        ("ValueError: 4111", f"ValueError: {HIDDEN}"),
        ("Traceback\n  4111\nshop.CardError: 4111\n", f"shop.CardError: {HIDDEN}"),
        ("4111 is stolen", HIDDEN),
        ("no such card 4111: stolen", HIDDEN),
    ],
)
def test_of_an_error_of_unknown_arguments_the_type_is_shown(error: str, said: str) -> None:
    assert Mask(["card"]).error(error) == said
    assert Mask().error(error) == error


def test_a_key_is_hidden_if_the_mask_names_it_or_its_field() -> None:
    message = found(b'{"card": "4111"}')._replace(token="t" + traits_of("x", key="card-4111"))
    assert message.key == "card-4111"
    for patterns, key in (((), "card-4111"), (("card",), f"card-{HIDDEN}"), (("x-key",), HIDDEN)):
        assert (
            Reader(Mask(patterns), PageExtras()).read(message, 0, DecompressionBudget()).key == key
        )
