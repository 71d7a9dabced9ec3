"""Installed is enough: the URL schemes are known without an import (K1, X7); and what may
import what."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

import celery_toc
import kombu_toc

from ..support import nursery

pytestmark = pytest.mark.versions

KOMBU_TOC = Path(kombu_toc.__file__).parent
CELERY_TOC = Path(celery_toc.__file__).parent


def python(program: str) -> str:
    """What a fresh interpreter prints that runs this program."""
    return nursery.done(("-c", program), execute=True).stdout.strip()


# -- registration


def test_a_program_that_imports_only_celery_has_the_transport(server):
    """K1, X7: change the URL, nothing else. What Flower needs is loaded only where Flower is."""
    program = f"""
import sys
from celery import Celery
app = Celery(broker="{server.toc_url}")
app.send_task("x", countdown=3600, queue="plugin-celery")
with app.connection() as connection:
    print(connection.default_channel.queue_declare("plugin-celery").message_count)
for scheme in ("toc", "toc+redis", "toc+rediss"):
    transport = Celery(broker=f"{{scheme}}://localhost:1/0").connection().transport
    print(type(transport).__module__, transport.driver_type, "celery_toc.flower" in sys.modules)
"""
    known = ["kombu_toc.transport.transport redis False"] * 3
    assert python(program).splitlines() == ["1", *known]


def test_a_program_that_produces_with_kombu_imports_the_package_first(server):
    """Kombu alone does not load Celery through us."""
    program = f"""
import sys, kombu_toc
from kombu import Connection, Producer
with Connection("{server.toc_url}") as connection:
    Producer(connection).publish({{"n": 1}}, routing_key="plugin-kombu")
    print(connection.default_channel.queue_declare("plugin-kombu").message_count)
print("celery" in sys.modules, "celery_toc" in sys.modules)
"""
    assert python(program).splitlines() == ["1", "False False"]


def test_once_kombu_has_serialized_anything_the_schemes_are_known():
    """There is no public way by which Kombu would find a transport in another package sooner: the
    page of errors has what it says. The serializer that we register changes nothing for others."""
    program = """
from kombu import Connection
try:
    Connection("toc+redis://localhost:1/0").transport
except KeyError as exc:
    print(exc.args[0])
from kombu.serialization import dumps, loads
content_type, encoding, data = dumps({"a": 1})
print(content_type, encoding, loads(data, content_type, encoding))
print(type(Connection("toc+redis://localhost:1/0").transport).__module__)
"""
    said, *known = python(program).splitlines()
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    assert said and f"`{said}`" in page
    assert known == ["application/json utf-8 {'a': 1}", "kombu_toc.transport.transport"]


WEB = "celery -b toc+redis://localhost:1/0 toc web --port 0"
NOTIFY = "celery -b toc+redis://localhost:1/0 toc notify --unsigned"
LACKING = [
    (WEB, "greenlet uvicorn", "http"),
    (WEB, "uvicorn", "http"),
    (f"{WEB} --notify /dev/null", "uvicorn aiohttp", "http,notify"),
    ("kombu_toc.http --broker toc+redis://", "greenlet uvicorn", "http"),
    ("kombu_toc.http --broker toc+redis:// --notify /dev/null", "aiohttp", "http,notify"),
    (NOTIFY, "greenlet aiohttp", "notify"),
    (NOTIFY, "aiohttp", "notify"),
    ("kombu_toc.notify --broker toc+redis:// --unsigned", "greenlet aiohttp", "notify"),
]


def test_a_program_names_the_extra_that_brings_all_that_it_lacks(subtests):
    """Each is a fork of a process that has imported what belongs to no extra."""
    program = f"""
import json, os, runpy, sys, tempfile
import celery.bin.celery, celery_toc.cli, kombu_toc.transport.transport
for words, away, _ in {LACKING!r}:
    with tempfile.TemporaryFile("w+") as errors:
        if not os.fork():
            os.dup2(errors.fileno(), 2)
            sys.argv = words.split()
            sys.modules.update(dict.fromkeys(away.split()))
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            sys.exit()
        code = os.waitstatus_to_exitcode(os.wait()[1])
        errors.seek(0)
        print(json.dumps([code, errors.read()]), flush=True)
"""
    for (words, away, extra), line in zip(LACKING, python(program).splitlines(), strict=True):
        with subtests.test(f"{words} without {away}"):
            code, errors = json.loads(line)
            [error] = errors.strip().splitlines()
            assert code and error.endswith(f"pip install 'celery-toc[{extra}]'")
            assert all(name in error for name in away.split())


def test_a_task_library_names_the_extra_that_it_lacks():
    program = """
import sys
sys.modules.update(sqlalchemy=None, alembic=None)
from kombu import Connection
from kombu_toc import ConfigurationError, center_for
url = "toc+redis://localhost:1/0?toc_library=sqlite:////nowhere.db"
for ask in (center_for, lambda url: Connection(url).default_channel):
    try:
        ask(url)
    except ConfigurationError as exc:
        print(exc)
"""
    needs = "toc_library needs the packages sqlalchemy and alembic"
    assert python(program).splitlines() == [f"{needs}: pip install 'celery-toc[library]'"] * 2


def test_the_plugin_imports_neither_redis_nor_celery():
    program = """
import sys, kombu_toc.plugin
heavy = {"redis", "celery", "crcmod", "kombu_toc.center", "kombu_toc.transport"}
print(sorted(heavy & set(sys.modules)))
"""
    assert python(program) == "[]"


def test_registering_never_raises_even_where_kombu_has_no_such_table():
    program = """
import sys, types
sys.modules["kombu"] = types.ModuleType("kombu")
sys.modules["kombu.transport"] = types.ModuleType("kombu.transport")
import kombu_toc.plugin
kombu_toc.plugin.register()
print("quiet")
"""
    assert python(program) == "quiet"


def test_a_scheme_that_somebody_else_registered_is_left_alone():
    program = """
from kombu.transport import TRANSPORT_ALIASES
TRANSPORT_ALIASES["toc"] = "theirs:Transport"
import kombu_toc
print(TRANSPORT_ALIASES["toc"], TRANSPORT_ALIASES["toc+redis"])
"""
    assert python(program) == "theirs:Transport kombu_toc.transport.transport:Transport"


def test_registering_twice_is_registering_once():
    from kombu.transport import TRANSPORT_ALIASES

    before = dict(TRANSPORT_ALIASES)
    kombu_toc.register()
    assert before == TRANSPORT_ALIASES
    assert {"toc", "toc+redis", "toc+rediss", "toc+unix", "toc+embedded"} <= set(before)


# -- countdowns


COUNTDOWNS = """
from kombu_toc import COUNTDOWN
from celery import Celery
def marked(amqp, **times):
    return COUNTDOWN in amqp.create_task_message("id", "name", **times).properties
app = Celery(broker="toc+redis://localhost:1/0", set_as_current=False)
before = app.amqp.create_task_message  # it has been asked for, and Celery caches it
app.connection().transport
"""


def test_a_message_tells_whether_its_time_was_a_countdown():
    """One of protocol 1 shows its id and its eta. Who makes messages in another way still can."""
    program = """
print(marked(app.amqp, countdown=3), marked(app.amqp, countdown=-3))
print(marked(app.amqp, eta="2100-01-01"), marked(app.amqp, countdown=0), marked(app.amqp))
old = Celery(set_as_current=False)
old.conf.task_protocol = 1
message = old.amqp.create_task_message("id", "name", countdown=3)
print(message.headers["eta"] == message.body["eta"], COUNTDOWN in message.properties)
print(old.amqp.create_task_message("id", "name").headers)
app.amqp.create_task_message = lambda *args, **options: ({}, {}, (args, options), None)
headers, properties, body, _ = app.amqp.create_task_message("id", "name", create=1)
print(headers, properties, body)
del app.amqp.create_task_message
print(marked(app.amqp, countdown=3))
"""
    assert python(COUNTDOWNS + program).splitlines() == [
        *("True True", "False False False"),
        *("True True", "{'id': 'id'}"),
        *("{} {} (('id', 'name', None, None, None), {'create': 1})", "True"),
    ]


# -- the arrows between the packages run one way


def test_kombu_toc_imports_nothing_of_celery():
    """Nor does it inside a function or for a type checker, where import-linter looks too."""
    imports = re.compile(r"^ *(?:import|from) [^#\n]*\bcelery(?:_toc)?\b", re.M)
    assert [path for path in KOMBU_TOC.rglob("*.py") if imports.search(path.read_text())] == []


def private_names_used(path):
    """What a module takes of kombu_toc beside its public names: those that import-linter cannot
    see, for it knows modules only."""
    extras = {"http", "exporter", "notify"}  # what needs an extra has public names of its own
    public = {"kombu_toc": set(kombu_toc.__all__) | extras}
    for name in extras:
        names = set(importlib.import_module(f"kombu_toc.{name}").__all__)
        public[name] = public[f"kombu_toc.{name}"] = names
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "kombu_toc":
                names = {alias.name for alias in node.names}
                yield from (f"{module}.{name}" for name in names - public.get(module, set()))
            case ast.Import():
                yield from (one.name for one in node.names if one.name.startswith("kombu_toc."))
            case ast.Attribute(value=ast.Name(id="kombu_toc" | "http" as module), attr=name):
                if name not in public[module]:
                    yield f"{module}.{name}"


def test_celery_toc_uses_only_the_public_names_of_kombu_toc():
    used = {str(path): set(private_names_used(path)) for path in CELERY_TOC.rglob("*.py")}
    assert {path: names for path, names in used.items() if names} == {}


def test_every_public_name_is_there():
    for package in (kombu_toc, celery_toc):
        for name in package.__all__:
            assert getattr(package, name) is not None


def defined_in(package, module):
    """The names of a module that are its own: what a star in an import stands for."""
    found = importlib.import_module(f"{package.__name__}.{module}")
    mine = (name for name, value in vars(found).items() if value.__class__ is type)
    return [name for name in mine if getattr(found, name).__module__ == found.__name__]


@pytest.mark.parametrize("package", [kombu_toc, celery_toc], ids=lambda package: package.__name__)
def test_a_type_checker_finds_the_public_names_where_they_are(package):
    tree = ast.parse(Path(package.__file__).read_text())
    [block] = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    typed = {
        name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        for name in ([alias.asname] if alias.name != "*" else defined_in(package, node.module))
    }
    assert typed == package._PLACES


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'nothing'"):
        kombu_toc.nothing  # noqa: B018
