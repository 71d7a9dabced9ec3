"""docs/promises.md names tests that there are, and every promise that a test cites; each is held by
a test that runs by day, and each test of the night by another of the day. So is each sentence of
docs/security.md about who can do what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "promises.md").read_text()

ROWS = {
    id: re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
    for id, tests in re.findall(r"^\| ([A-Z]\d+) \| .* \| (.*) \|$", PAGE, re.MULTILINE)
}

#: What docs/security.md says that somebody can or cannot do, and the tests that hold it.
THREATS = """
has a Redis user above
  read, change and delete every task
    e2e/test_acl.py::test_each_role_can_change_every_task_and_touches_nothing_else
  run code in workers whose apps accept pickle
    e2e/test_web.py::test_a_message_that_is_looked_at_runs_nothing_and_is_expanded_to_a_bound
  touch other keys
    e2e/test_acl.py::test_each_role_can_change_every_task_and_touches_nothing_else
  administer Redis
    e2e/test_acl.py::test_each_role_can_change_every_task_and_touches_nothing_else
  run code in other workers
    e2e/test_dead_letters.py::test_what_cannot_be_executed_is_kept_with_its_reason
  run code on the page, in the HTTP API, `celery toc` or `center.task(found)`
    e2e/test_web.py::test_a_message_that_is_looked_at_runs_nothing_and_is_expanded_to_a_bound
    e2e/test_web.py::test_a_command_that_shows_messages_runs_nothing_and_expands_them_to_a_bound
sends messages
  fill Redis, unless a put rate is set
    e2e/test_full_server.py::test_tasks_are_still_refused_by_a_full_server
    contract/test_put_rates.py::test_so_many_are_put_as_the_rate_says_and_the_next_is_told_when
  run script on the page
    unit/test_page_parts.py::test_a_template_escapes_all_that_it_is_given_and_proves_each_form_that_it_posts
    contract/test_page.py::test_whatever_names_there_are_they_are_shown_as_text_and_can_be_acted_on
  make a reader expand a compressed body without bound
    unit/test_envelope.py::test_what_expands_to_more_than_may_be_is_not_expanded
    unit/test_task.py::test_a_body_is_expanded_to_a_bound_in_one_stream
  have the notifier call private addresses
    unit/test_notifier.py::test_what_is_not_public_is_refused_and_the_way_out_told
    unit/test_notifier.py::test_a_name_that_leads_elsewhere_when_it_is_connected_to_is_refused
reaches the HTTP port
  ask `/healthz`, `/readyz` and `/openapi.json`
    contract/test_http_security.py::test_without_a_valid_token_there_is_nothing
  try tokens
    contract/test_http_security.py::test_without_a_valid_token_there_is_nothing
  take up all `--connections`
    contract/test_page_tokens.py::test_a_server_has_so_many_connections_and_says_so_to_the_next
  do anything else without a token
    contract/test_http_security.py::test_no_operation_is_open_to_who_has_not_its_role_for_its_queue
    contract/test_page_tokens.py::test_without_a_session_nothing_is_shown_but_where_to_sign_in
  have large bodies kept
    contract/test_http_edges.py::test_a_token_is_refused_before_a_large_body_is_read
    contract/test_page_tokens.py::test_who_has_not_signed_in_has_nothing_large_kept
  without tokens, come from another machine, a web page or a proxy
    contract/test_http_security.py::test_without_tokens_it_listens_on_loopback_only_and_says_so
    contract/test_http_security.py::test_without_tokens_neither_a_page_nor_a_proxy_reaches_it
has a token
  what its roles say, for its queues
    contract/test_http_security.py::test_a_token_allows_its_roles_for_its_queues_and_nothing_else
  see other queues
    contract/test_http_security.py::test_a_list_of_queues_has_those_that_the_token_may_see
  act by a receipt of one
    contract/test_http_security.py::test_a_receipt_gives_no_right_to_another_queue
  go past its rate
    contract/test_http_security.py::test_a_rate_is_kept_and_says_when_to_come_again
    contract/test_page_tokens.py::test_the_rate_of_a_token_holds_for_the_page
  send tasks that `--allow` does not name
    e2e/test_web.py::test_what_may_not_be_sent_is_refused_and_nothing_is
  go on when it is removed
    contract/test_http_security.py::test_a_token_that_is_removed_ends_and_one_that_is_added_counts_without_a_restart
is signed in at the page
  the same, for 12 hours
    contract/test_page_tokens.py::test_a_token_sees_and_does_what_its_roles_and_queues_allow
    contract/test_page_tokens.py::test_a_session_has_a_new_cookie_that_tells_nothing_of_the_token
  act without a trace in the audit log
    contract/test_page.py::test_whatever_names_there_are_they_are_shown_as_text_and_can_be_acted_on
    contract/test_page_jobs.py::test_the_log_says_who_has_stopped_what_another_has_begun
  be made to act by another site's form
    contract/test_page.py::test_a_form_counts_only_with_what_the_page_has_put_into_it
is between you and Redis
  read passwords and messages without TLS
    contract/test_tls.py::test_who_is_between_reads_everything_without_tls_and_nothing_with_it
  read them with `rediss://`
    contract/test_tls.py::test_who_is_between_reads_everything_without_tls_and_nothing_with_it
  take the server's place, unless certificates are not checked
    contract/test_tls.py::test_an_unknown_authority_is_not_trusted
    contract/test_tls.py::test_a_certificate_for_another_host_is_told_for_what_it_is
    contract/test_tls.py::test_certificates_are_not_checked_if_the_url_says_so
"""

#: How a docstring or a comment cites promises: alone, or several between commas.
CITED = re.compile(r"\b[AYWDKX]\d{1,2}\b")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def functions(file: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (\w+)", file.read_text(), re.MULTILINE))


def is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def decorators(file: Path, name: str) -> list[str]:
    """Those of a test, and its module's marks: what makes all of its cases tests of the night."""
    found = []
    for node in tree(file).body:
        if is_function(node) and node.name == name:
            found += [ast.unparse(one) for one in node.decorator_list]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found.append(ast.unparse(node.value))
    return found


def runs_by_day(file: Path, name: str) -> bool:
    """Whether a test of the file has that name, and runs by day in a case at least. (A test whose
    cases are all nightly is refused by tests/conftest.py.)"""
    if "nightly" not in file.read_text():
        return name in functions(file)  # without a look at its tree, which takes long
    marks = decorators(file, name)
    return name in functions(file) and not any(
        "mark.nightly" in one.partition("(")[0] for one in marks
    )


def guards() -> Iterator[tuple[str, str]]:
    """The name of a file, and the test that it names as guard of one of its tests."""
    for file in TESTS.rglob("test_*.py"):
        if "guarded_by=" in file.read_text():
            for node in ast.walk(tree(file)):
                if isinstance(node, ast.keyword) and node.arg == "guarded_by":
                    yield file.name, ast.literal_eval(node.value)


def cited() -> set[str]:
    """The promises that the docstrings of the tests cite."""
    ids = set()
    for file in TESTS.rglob("test_*.py"):
        if not CITED.search(file.read_text()):
            continue
        for node in (tree(file), *tree(file).body):
            if isinstance(node, ast.Module) or is_function(node):
                ids.update(CITED.findall(ast.get_docstring(node) or ""))
    return ids


def test_every_promise_is_held_by_tests_that_there_are() -> None:
    assert len(ROWS) > 40
    for id, tests in ROWS.items():
        assert tests, f"no test is named for {id}"
        for file, name in tests:
            assert (TESTS / file).is_file(), f"{id}: there is no tests/{file}"
            assert name in functions(TESTS / file), f"{id}: there is no {name} in tests/{file}"


def test_every_promise_is_held_by_a_test_that_runs_by_day() -> None:
    by_day = {
        id for id, tests in ROWS.items() for one in tests if runs_by_day(TESTS / one[0], one[1])
    }
    assert {*ROWS} - by_day == set()


def test_what_runs_at_night_is_guarded_by_a_test_that_runs_by_day() -> None:
    found = list(guards())
    for where, guard in found:
        path, _, name = guard.partition("::")
        file = TESTS.parent / path
        assert file.is_file(), f"{where}: there is no {path}"
        assert runs_by_day(file, name.partition("[")[0]), f"{where}: {guard} does not run by day"


def test_the_promises_that_tests_cite_are_those_on_the_page() -> None:
    """So no row is lost, and none stands for a test that knows nothing of it."""
    assert cited() == {*ROWS}


def test_each_sentence_about_who_can_do_what_is_held_by_a_test_that_runs_by_day() -> None:
    page = (TESTS.parent / "docs" / "security.md").read_text().partition("## Who can do what")[2]
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    said = [[who, *f"{can}; {cannot}".split("; ")] for who, can, cannot in rows[1:]]
    lines = [line for line in THREATS.splitlines() if line and not line.startswith("    ")]
    assert [line.strip() for line in lines] == [text for row in said for text in row]
    for sentence, tests in re.findall(r"^  (\S.*)\n((?:    .*\n)*)", THREATS, re.MULTILINE):
        assert tests, f"no test is named for {sentence!r}"
        for test in tests.split():
            file, _, name = test.partition("::")
            assert runs_by_day(TESTS / file, name), f"{sentence}: {test} does not run by day"
