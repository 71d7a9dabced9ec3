"""What programs may use has not changed unseen."""

from __future__ import annotations

import json

from tests.public_names import FILE, public_names


def test_public_names_commands_and_options_are_those_of_the_file() -> None:
    """After a change on purpose: a line in CHANGELOG.md, and ``python -m tests.public_names``."""
    written, found = json.loads(FILE.read_text()), public_names()
    for kind in written:
        assert found[kind] == written[kind], kind
