"""For check_package.py: whether an installed celery-toc, without any extra, has all its parts."""

import importlib
import pkgutil
from importlib.metadata import distribution
from importlib.resources import files

from kombu_toc.errors import ConfigurationError
from kombu_toc.scripts import call

#: Modules and packages that need an extra, or another library, and the modules that it brings.
EXTRAS = {
    "celery_toc.metrics": ("prometheus_client",),
    "kombu_toc.transport.recorded": ("sqlalchemy",),
    "kombu_toc.aio": ("greenlet",),
    "kombu_toc.center.traced": ("opentelemetry",),
    "kombu_toc.exporter": ("prometheus_client",),
    "kombu_toc.http": ("greenlet", "uvicorn"),
    "kombu_toc.library": ("sqlalchemy", "alembic"),
    "kombu_toc.tracing": ("opentelemetry",),
    "kombu_toc.transport.traced": ("opentelemetry",),
    "kombu_toc.notify": ("greenlet", "aiohttp"),
    "celery_toc.aio": ("greenlet",),
    "celery_toc.django": ("django",),
    "celery_toc.web": ("greenlet", "uvicorn", "django"),
}


def needed_by(module: str) -> tuple[str, ...]:
    """The modules that an extra brings for it."""
    return next((e for name, e in EXTRAS.items() if f"{module}.".startswith(f"{name}.")), ())


modules = 0
for name in ("kombu_toc", "celery_toc"):
    package = importlib.import_module(name)
    assert "site-packages" in package.__file__, f"{name} is not what was installed"
    assert files(name).joinpath("py.typed").is_file(), f"{name} has no py.typed"
    # A package that needs an extra is tried below, and has no further modules here.
    for module in pkgutil.walk_packages(package.__path__, f"{name}.", lambda name: None):
        try:
            importlib.import_module(module.name)
        except (ModuleNotFoundError, ConfigurationError) as exc:
            missing = exc if isinstance(exc, ModuleNotFoundError) else exc.__cause__
            if getattr(missing, "name", None) not in needed_by(module.name):
                raise
        modules += 1

found = call.names()
assert len(found) > 50
for script in found:
    assert call.load(script).text, f"{script} is empty"

migrations = files("kombu_toc.library").joinpath("migrations")
for script in ("env.py", "versions/v0001_tables.py"):
    assert migrations.joinpath(script).is_file(), f"Alembic's {script} is missing"

installed = distribution("celery-toc")
for entry in installed.entry_points:
    entry.load()

print(f"celery-toc {installed.version}: {modules} modules and {len(found)} scripts load")
