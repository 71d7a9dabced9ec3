"""Which tests run in one process where several run tests."""

from __future__ import annotations

import re
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_POOL = r".*\b(prefork|threads|solo|gevent|eventlet)\b"

#: Tests that share a worker, or a browser, which takes seconds to start: those whose ids say the
#: same here. (Marks could say so, but xdist 3.8 does not see them with pytest 9.2.)
SHARING = re.compile(
    rf"tests/(?:e2e|pools)/(test_celery{_POOL}|test_faults{_POOL}|test_flower"
    r"|test_clocks.*\b((?:prefork|threads)-(?:ahead|behind)|right-worker)\b)"
)

#: Tests of one file, which share a server of the API or of the page, or certificates.
FILE = re.compile(r"tests/contract/test_(?:http|page|schedule_pages|tls)\w*\.py")

#: Tests that stop a database server, whose data takes seconds to make.
DATABASE = re.compile(r"tests/\w+/test_library_faults\.py.*\b(postgresql|mariadb)\b")


def scope_of(nodeid: str) -> str:
    """What tests have in common that run in one process, one after the other."""
    if database := DATABASE.match(nodeid):
        return f"{database[1]} that is stopped"
    if file := FILE.match(nodeid):
        return file[0]
    found = SHARING.match(nodeid)
    if found is None:
        return nodeid
    return " ".join(filter(None, (nodeid.partition("::")[0], *found.groups()[1:])))


class Scheduling(LoadScopeScheduling):
    """In the order in which they were collected, what takes longest comes first: folders of tests
    are in that order."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        # All that it keeps is counted after each test.
        work = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(work[scope].values()):
            del work[scope]
