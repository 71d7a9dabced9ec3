"""For tox: the Pythons of pyenv are there, whichever of them is chosen just now."""

import os
from pathlib import Path

versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
folders = [str(path.parent) for path in sorted(versions.glob("3.*/bin/python"))]
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
