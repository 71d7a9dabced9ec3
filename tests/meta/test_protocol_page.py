"""docs/protocol.md is of the protocol that there is; the site's page of scripts says what each is
called with, as the heads of the scripts say."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kombu_toc.center.center import CONSUMERS, PRODUCERS
from kombu_toc.model.limits import LIMITS
from kombu_toc.model.message import DICTIONARY
from kombu_toc.model.topic import Declaration
from kombu_toc.scripts import __main__ as writer
from kombu_toc.scripts.__main__ import PROTOCOL, as_data, head, names
from kombu_toc.scripts.call import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
SCRIPTS = ROOT / "kombu_toc" / "scripts"


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """.ci/site.py"""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / ".ci" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_heads_of_the_scripts_say(site: ModuleType) -> None:
    page = site.scripts()
    assert re.findall(r"^## `(\w+)`$", page, re.MULTILINE) == names()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    for name, section in zip(names(), sections, strict=True):
        said = head(name)
        assert site.shown(said.about) in section
        assert section.count("\n- ") == len(said.keys) + len(said.arguments), name
    assert "- `KEYS[1]` store (of its priority step)" in page


def test_a_link_leads_to_where_its_target_is_on_the_site(site: ModuleType) -> None:
    assert site.links("[a](docs/python.md#limits)", "README.md") == "[a](python.md#limits)"
    assert site.links("[a](../README.md)", "docs/page.md") == "[a](index.md)"
    assert site.links("[a](../examples/node/README.md)", "docs/page.md") == (
        "[a](repository/examples/node/README.md)"
    )
    assert site.links("[a](../../docs/library.md)", "examples/library/README.md") == (
        "[a](../../../library.md)"
    )
    assert site.links("[a](https://a.b/docs)", "README.md") == "[a](https://a.b/docs)"


def test_the_page_is_of_this_protocol() -> None:
    assert f"**protocol {PROTOCOL}**" in PAGE


def test_each_file_is_an_operation_or_a_fragment_of_one() -> None:
    operations, fragments = (
        {file.stem: file.read_text() for file in SCRIPTS.glob(f"{folder}/*.lua")}
        for folder in ("operations", "lib")
    )
    text = "\n".join([*operations.values(), *fragments.values()])
    assert set(" ".join(re.findall(r"^--@ (.+)", text, re.MULTILINE)).split()) <= fragments.keys()
    assert not operations.keys() & fragments.keys()
    assert all(text.startswith("-- Fragment:") for text in fragments.values())
    limited = {name for name in names() if name not in operations}
    assert {name.removesuffix("_limited") for name in limited} <= operations.keys()
    assert set(names()) == operations.keys() | limited
    assert {*PRODUCERS, *CONSUMERS} <= set(names())


def test_the_head_of_a_script_says_what_it_is_called_with() -> None:
    assert [fault for name in names() for fault in faults_of_head(name)] == []


def faults_of_head(name: str) -> Iterator[str]:
    said, text = head(name), load(name).text
    if not (said.about and said.keys):
        yield f"{name} does not say what it does and with which keys"
    for word, entries in (("KEYS", said.keys), ("ARGV", said.arguments)):
        if re.search(rf"\b{word}\b", text) and not entries:
            yield f"{name} does not name its {word}"
        numbered = [re.match(rf"{word}\[(\d+)", entry) for entry in entries]
        numbers = [int(match[1]) for match in numbered if match]
        if numbers != sorted(numbers):
            yield f"{name} names its {word} out of order"
        used = [int(number) for number in re.findall(rf"\b{word}\[(\d+)\]", text)]
        open_ended = re.search(r"\.\.\.\]|, per|then", " ".join(entries))
        if numbers and not open_ended and max(used, default=0) > numbers[-1]:
            yield f"{name} uses {word}[{max(used)}], and names {numbers[-1]}"


def test_an_entry_ends_where_the_next_one_begins() -> None:
    said = head("pop")
    assert said.arguments[:3] == [
        "ARGV[1] number of slots",
        "ARGV[2] number of priority steps",
        "ARGV[3] how many may be taken that are due within ARGV[4] microseconds from now",
    ]
    assert said.keys[0].startswith("KEYS, per slot: armed, prepare, body, dead, reasons, tokens")
    assert head("declare").keys[:2] == ["KEYS[1] topics", "KEYS[2] expiring"]


def test_the_document_has_what_evalsha_needs() -> None:
    scripts = as_data()["scripts"]
    assert isinstance(scripts, dict)
    for name, script in scripts.items():
        assert hashlib.sha1(script["text"].encode()).hexdigest() == script["sha1"] == load(name).sha


def test_the_command_writes_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert writer.main([]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["protocol"] == PROTOCOL
    assert data["dictionary"].encode() == DICTIONARY
    assert data["scripts"]["put"]["keys"][0] == "KEYS[1] store (of its priority step)"


def test_every_field_of_a_declaration_is_explained() -> None:
    written = json.loads(Declaration(draining_counts=(4,), previous_counts=(4,)).to_json())
    fields = {*written, *LIMITS, "steps", "bases", "named"}
    table = PAGE.split("## Topics")[1].split("## Slots")[0]
    assert {field for field in fields if f"`{field}`" not in table} == set()
