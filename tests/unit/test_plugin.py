"""Installed is enough: the URL schemes are known without an import (K1, X7); and what may
import what."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import celery_toc
import kombu_toc

from ..support.cases import each

KOMBU_TOC = Path(kombu_toc.__file__).parent
CELERY_TOC = Path(celery_toc.__file__).parent


def python(program: str) -> str:
    """What a fresh interpreter prints that runs this program."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imports(path: Path) -> set[str]:
    """The top-level packages that a module imports, at its head or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


# -- registration


@pytest.mark.versions
@each("scheme", ["toc", "toc+redis", "toc+rediss"])
def test_a_program_that_imports_only_celery_has_the_transport(scheme):
    """K1: change the URL, nothing else."""
    program = f"""
from celery import Celery
app = Celery(broker="{scheme}://localhost:1/0")
transport = app.connection().transport
print(type(transport).__module__, transport.driver_type)
"""
    assert python(program) == "kombu_toc.transport.transport redis"


@pytest.mark.versions
def test_a_program_that_sends_a_task_needs_no_import_of_ours(server):
    """K1"""
    program = f"""
from celery import Celery
app = Celery(broker="{server.toc_url}")
app.send_task("x", countdown=3600, queue="plugin-celery")
with app.connection() as connection:
    print(connection.default_channel.queue_declare("plugin-celery").message_count)
"""
    assert python(program) == "1"


@pytest.mark.versions
def test_a_program_that_produces_with_kombu_imports_the_package_first(server):
    program = f"""
import kombu_toc
from kombu import Connection, Producer
with Connection("{server.toc_url}") as connection:
    Producer(connection).publish({{"n": 1}}, routing_key="plugin-kombu")
    print(connection.default_channel.queue_declare("plugin-kombu").message_count)
"""
    assert python(program) == "1"


@pytest.mark.versions
def test_the_page_of_errors_has_what_kombu_says_without_it():
    """There is no public way by which Kombu would find a transport in another package."""
    program = """
from kombu import Connection
try:
    Connection("toc+redis://localhost:1/0").transport
except KeyError as exc:
    print(exc.args[0])
"""
    said = python(program)
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    assert said and f"`{said}`" in page


WEB = "celery -b toc+redis://localhost:1/0 toc web --port 0"
NOTIFY = "celery -b toc+redis://localhost:1/0 toc notify --unsigned"


@each(
    ("words", "away", "extra"),
    [
        (WEB, "greenlet uvicorn", "http"),
        (WEB, "uvicorn", "http"),
        (f"{WEB} --notify /dev/null", "uvicorn aiohttp", "http,notify"),
        ("kombu_toc.http --broker toc+redis://", "greenlet uvicorn", "http"),
        ("kombu_toc.http --broker toc+redis:// --notify /dev/null", "aiohttp", "http,notify"),
        (NOTIFY, "greenlet aiohttp", "notify"),
        (NOTIFY, "aiohttp", "notify"),
        ("kombu_toc.notify --broker toc+redis:// --unsigned", "greenlet aiohttp", "notify"),
    ],
)
def test_a_program_names_the_extra_that_brings_all_that_it_lacks(words, away, extra):
    module, *rest = words.split()
    program = f"""
import runpy, sys
sys.argv = {[module, *rest]!r}
for name in {away.split()!r}:
    sys.modules[name] = None
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    [line] = done.stderr.strip().splitlines()
    assert done.returncode and line.endswith(f"pip install 'celery-toc[{extra}]'"), done
    assert all(name in line for name in away.split())


@pytest.mark.parametrize("asks", ["center_for(url)", "Connection(url).default_channel"])
def test_a_task_library_names_the_extra_that_it_lacks(asks):
    program = f"""
import sys
sys.modules.update(sqlalchemy=None, alembic=None)
from kombu import Connection
from kombu_toc import ConfigurationError, center_for
url = "toc+redis://localhost:1/0?toc_library=sqlite:////nowhere.db"
try:
    {asks}
except ConfigurationError as exc:
    print(exc)
"""
    needs = "toc_library needs the packages sqlalchemy and alembic"
    assert python(program) == f"{needs}: pip install 'celery-toc[library]'"


@pytest.mark.versions
def test_once_kombu_has_serialized_anything_the_schemes_are_known():
    program = """
from kombu import Connection
from kombu.serialization import dumps, loads
content_type, encoding, data = dumps({"a": 1})
loads(data, content_type, encoding)
print(type(Connection("toc+redis://localhost:1/0").transport).__module__)
"""
    assert python(program) == "kombu_toc.transport.transport"


def test_the_plugin_imports_neither_redis_nor_celery():
    program = """
import sys, kombu_toc.plugin
heavy = {"redis", "celery", "crcmod", "kombu_toc.center", "kombu_toc.transport"}
print(sorted(heavy & set(sys.modules)))
"""
    assert python(program) == "[]"


@pytest.mark.versions
def test_kombu_alone_does_not_load_celery_through_us(server):
    program = f"""
import sys, kombu_toc
from kombu import Connection
with Connection("{server.toc_url}") as connection:
    connection.default_channel
print("celery" in sys.modules, "celery_toc" in sys.modules)
"""
    assert python(program) == "False False"


def test_what_flower_needs_is_loaded_only_where_flower_is():
    program = """
import sys
from celery import Celery
app = Celery(broker="toc+redis://localhost:1/0")
app.connection().transport
print("celery_toc.flower" in sys.modules)
"""
    assert python(program) == "False"


@pytest.mark.versions
def test_the_registered_serializer_changes_nothing_for_others():
    program = """
from kombu.serialization import dumps, loads
content_type, encoding, data = dumps({"a": 1})
print(content_type, encoding, loads(data, content_type, encoding))
"""
    assert python(program) == "application/json utf-8 {'a': 1}"


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


@pytest.mark.versions
def test_a_message_tells_whether_its_time_was_a_countdown():
    program = """
print(marked(app.amqp, countdown=3), marked(app.amqp, countdown=-3))
print(marked(app.amqp, eta="2100-01-01"), marked(app.amqp, countdown=0), marked(app.amqp))
"""
    assert python(COUNTDOWNS + program).splitlines() == ["True True", "False False False"]


@pytest.mark.versions
def test_a_message_of_protocol_1_shows_its_id_and_its_eta():
    program = """
old = Celery(set_as_current=False)
old.conf.task_protocol = 1
message = old.amqp.create_task_message("id", "name", countdown=3)
print(message.headers["eta"] == message.body["eta"], COUNTDOWN in message.properties)
print(old.amqp.create_task_message("id", "name").headers)
"""
    assert python(COUNTDOWNS + program).splitlines() == ["True True", "{'id': 'id'}"]


@pytest.mark.versions
def test_who_makes_messages_in_another_way_still_can():
    program = """
app.amqp.create_task_message = lambda *args, **options: ({}, {}, (args, options), None)
headers, properties, body, _ = app.amqp.create_task_message("id", "name", create=1)
print(headers, properties, body)
del app.amqp.create_task_message
print(marked(app.amqp, countdown=3))
"""
    made = "{} {} (('id', 'name', None, None, None), {'create': 1})"
    assert python(COUNTDOWNS + program).splitlines() == [made, "True"]


# -- the arrows between the packages run one way


def test_kombu_toc_imports_nothing_of_celery():
    """Nor does it inside a function or for a type checker, where import-linter looks too."""
    ours = {"celery", "celery_toc"}
    assert {str(path) for path in KOMBU_TOC.rglob("*.py") if imports(path) & ours} == set()


def private_names_used(path):
    """What a module takes of kombu_toc beside its public names: those that import-linter cannot
    see, for it knows modules only."""
    public = {"kombu_toc": set(kombu_toc.__all__)}
    for module in ("kombu_toc.http", "kombu_toc.exporter", "kombu_toc.notify"):
        # What needs an extra has public names of its own.
        public[module] = set(importlib.import_module(module).__all__)
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "kombu_toc":
                names = {alias.name for alias in node.names}
                yield from (f"{module}.{name}" for name in names - public.get(module, set()))
            case ast.Import():
                yield from (one.name for one in node.names if one.name.startswith("kombu_toc."))
            case ast.Attribute(value=ast.Name(id="kombu_toc"), attr=name):
                if name not in public["kombu_toc"]:
                    yield f"kombu_toc.{name}"


def test_celery_toc_uses_only_the_public_names_of_kombu_toc():
    used = {str(path): set(private_names_used(path)) for path in CELERY_TOC.rglob("*.py")}
    assert {path: names for path, names in used.items() if names} == {}


@pytest.mark.versions
def test_every_public_name_is_there():
    for package in (kombu_toc, celery_toc):
        for name in package.__all__:
            assert getattr(package, name) is not None


@pytest.mark.parametrize("package", [kombu_toc, celery_toc], ids=lambda package: package.__name__)
def test_a_type_checker_finds_the_public_names_where_they_are(package):
    tree = ast.parse(Path(package.__file__).read_text())
    [block] = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    typed = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert typed == package._PLACES


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'nothing'"):
        kombu_toc.nothing  # noqa: B018
