"""The catalogue of mutations: the runner tells what became of a fault, and no entry is out of date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mutations.__main__ import choose, run
from mutations.catalogue import MUTATIONS
from mutations.mutation import Mutation
from mutations.runner import Runner, failed_test, failure_text

ROOT = Path(__file__).parent.parent

FAST = '''
import subprocess, sys
def double(x):
    return 2 * x
def half(x):
    """Nobody tests it."""
    return x / 2
'''
TESTS = """
import pytest
from fast import double
@pytest.mark.parametrize("x", [1, 2], ids=["one", "number two"])
def test_double(x):
    assert double(x) == x + x
def test_double_of_text():
    assert double("a") == "aa"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with two functions, one of which is tested."""
    root = tmp_path_factory.mktemp("project")
    for folder, name, text in (("fast", "__init__.py", FAST), ("tests", "test_fast.py", TESTS)):
        (root / folder).mkdir()
        (root / folder / name).write_text(text)
    return root


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time of so small a run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def mutation(id: str, old: str, new: str, test: str = "test_double", sees: str = r"assert \d+ == ") -> Mutation:
    return Mutation(id, "__init__.py", old, new, "what it breaks", (f"tests/test_fast.py::{test}",), sees)


PLANTED = {
    "killed": mutation("tripled", "2 * x", "3 * x"),
    "survived": mutation("third", "x / 2", "x / 3"),
    "stale": mutation("gone", "x * 4", "x * 5"),
    "crashed": mutation("no syntax", "2 * x", "2 *"),
}


def test_the_four_ways_that_a_mutation_ends(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Runner(project, "fast") as runner:
        runner.check_import()
        assert runner.unmutated([PLANTED["killed"]]) == ""
        assert run(runner, [*PLANTED.values()], jobs=1) == 1
        out = capsys.readouterr().out
        assert run(runner, [PLANTED["killed"]], jobs=1) == 0
        assert capsys.readouterr().out.endswith("\n1 of 1 killed\n")
        folder = runner.clean.parent
    for status, m in PLANTED.items():
        assert re.search(rf"^{m.id} +__init__.py +{status} ", out, re.MULTILINE), out
    assert re.search(r"^tripled .* s  tests/test_fast.py::test_double\[one\]$", out, re.MULTILINE)
    assert "stale: gone (__init__.py): what it breaks\n__init__.py has the text 0 times: 'x * 4'\n" in out
    assert "SyntaxError" in out and out.endswith("\n1 of 4 killed\n")
    assert not folder.exists() and (project / "fast" / "__init__.py").read_text() == FAST


@pytest.mark.parametrize(
    ("m", "why"),
    [
        (mutation("another exception", "2 * x", "x.y"), "did not say"),
        (mutation("another reason", "2 * x", "3 * x", sees="no such number"), "did not say 'no such number'"),
        (mutation("no such test", "2 * x", "3 * x", test="test_treble"), "pytest ended with "),
        (mutation("an import that fails", "import subprocess", "import nothing_of_this_name"), "pytest ended with "),
    ],
    ids=lambda value: value.id.replace(" ", "-") if isinstance(value, Mutation) else "",
)
def test_failures_without_the_evidence_are_no_kills(project: Path, m: Mutation, why: str) -> None:
    with Runner(project, "fast") as runner:
        result = runner.run(m)
    assert (result.status, result.killer) == ("crashed", "") and why in result.why


def test_a_hang_is_ended_with_all_that_it_started(project: Path) -> None:
    """A child that held the pipe open would keep the runner waiting."""
    sleeps = "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with Runner(project, "fast", limit=3.0) as runner:
        result = runner.run(mutation("hang", "return 2 * x", f"return {sleeps}"))
    assert (result.status, result.why) == ("crashed", "not done after 3 s")


def test_tests_that_fail_anyway_say_nothing(project: Path, tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "fast" / "__init__.py").write_text(FAST.replace("2 * x", "0"))
    (tmp_path / "tests" / "test_fast.py").write_text(TESTS)
    with Runner(tmp_path, "fast") as runner:
        assert "assert 0 == (1 + 1)" in runner.unmutated([PLANTED["killed"]])


def test_what_a_failing_test_says_is_not_its_source() -> None:
    output = (
        "t.py:3: in test_a\n    assert near(1, 2), 'far'\nE   AssertionError: far\nE   assert False\n"
        "=== short test summary info ===\nFAILED t.py::test_a[dp=2, not [x] - y] - AssertionError: far\n"
    )
    assert failure_text(output) == "AssertionError: far\nassert False"
    assert failed_test(output, ["t.py::test_b", "t.py::test_a[dp=2, not [x] - y]"]) == "t.py::test_a[dp=2, not [x] - y]"
    assert failed_test(output, ["t.py::test_a"]).startswith("t.py::test_a[dp=2")
    assert failed_test(output, ["t.py::test", "test_a"]) == ""
    assert failed_test("1 passed\n", ["t.py::test_a"]) == ""


# The catalogue


@pytest.mark.quick
def test_no_entry_is_stale() -> None:
    """After a change of the code: find what the mutation was about, and give the entry its new text."""
    texts = {file: (ROOT / "dtensor_lm" / file).read_text(encoding="utf-8") for file in {m.file for m in MUTATIONS}}
    stale = [f"{m.id}: {m.old!r}" for m in MUTATIONS if texts[m.file].count(m.old) != 1 or m.old == m.new]
    assert stale == []
    ids = [m.id for m in MUTATIONS]
    assert sorted(ids) == sorted({*ids})


@pytest.mark.quick
def test_every_named_test_exists() -> None:
    for m in MUTATIONS:
        re.compile(m.sees)
        assert m.tests
        for test in m.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), f"{m.id}: {test}"


@pytest.mark.quick
def test_parts_together_are_all() -> None:
    parts = [choose(MUTATIONS, None, f"{i}/4") for i in (1, 2, 3, 4)]
    assert sorted(m.id for part in parts for m in part) == sorted(m.id for m in MUTATIONS)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    one = MUTATIONS[3].id
    assert [m.id for m in choose(MUTATIONS, [one], "1/1")] == [one]
    for only, part, message in ((["x"], "1/1", "no mutation is called x"), (None, "5/4", "1 <= I <= N")):
        with pytest.raises(ValueError, match=message):
            choose(MUTATIONS, only, part)
