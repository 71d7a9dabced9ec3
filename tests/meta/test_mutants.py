"""tests/mutants.py is about the code as it is."""

from __future__ import annotations

from ..mutants import MUTANTS, ROOT
from .test_promises import functions


def test_the_text_that_a_mutant_replaces_is_there_once() -> None:
    found = {one.name: (ROOT / one.file).read_text().count(one.text) for one in MUTANTS}
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert len(found) == len(MUTANTS), "two have one name"
    assert all(one.instead != one.text for one in MUTANTS)


def test_the_tests_of_a_mutant_are_there() -> None:
    for test in {test for one in MUTANTS for test in one.tests.split()}:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not name or name.partition("[")[0] in functions(ROOT / file), test
