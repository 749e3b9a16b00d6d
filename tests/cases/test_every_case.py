"""Every case that must hold has a test that carries its id.

An id such as LOSS-01 names a failure that users of other systems reported. A test that shows the right result is
marked `@pytest.mark.case("LOSS-01")`, and the end of a run says which cases passed.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.quick

REQUIRED = {
    "LOSS": (1, 2, 4, 6),
    "GRAD": (1, 2, 4),
    "TP": (1, 2, 3, 5, 6),
    "RNG": (1,),
    "NUM": (1, 2, 4, 5),
    "UX": (1, 2, 4),
    "PERF": (1, 2),
    "LOG": (1,),
    "PP": (1, 3, 4, 5),
}
# Of what is partly there: tests may carry these.
OTHERS = {"RNG": (2,), "LIFE": (1, 2, 3), "DATA": (5, 9)}


def ids(groups: dict[str, tuple[int, ...]]) -> set[str]:
    return {f"{group}-{number:02}" for group, numbers in groups.items() for number in numbers}


def marked(source: str) -> Counter[str]:
    """How often each id stands in a `pytest.mark.case(...)`. Raises `ValueError` for one that is not a string."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case":
            for argument in node.args:
                if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                    raise ValueError(f"line {node.lineno}: {ast.unparse(argument)} is not an id as a string")
                found[argument.value] += 1
    return found


def test_every_case_has_a_test() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(Path(__file__).parents[1].rglob("test_*.py")):
        if path.name != Path(__file__).name:
            for name in marked(path.read_text(encoding="utf-8")):
                found[name].append(path.name)
    assert sorted(ids(REQUIRED) - set(found)) == []
    unknown = {name: files for name, files in found.items() if name not in ids(REQUIRED) | ids(OTHERS)}
    assert unknown == {}, "misspelt, or to be added above"


def test_marks_are_read_from_the_source() -> None:
    source = '@pytest.mark.case("LOSS-01", "GRAD-01")\ndef test_a(): ...\npytestmark = [pytest.mark.case("GRAD-01")]\n'
    assert marked(source) == {"LOSS-01": 1, "GRAD-01": 2}
    with pytest.raises(ValueError, match="line 1: NAME is not an id as a string"):
        marked("pytest.mark.case(NAME)")


def test_the_summary_shows_failures_first(pytestconfig: pytest.Config) -> None:
    plugin = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))
    assert plugin is not None
    cases = plugin.cases

    def report(*names: str) -> SimpleNamespace:
        return SimpleNamespace(user_properties=[("case", name) for name in names])

    reports = {
        "passed": [report("A-01", "B-01"), report("A-01"), report("C-01"), report()],
        "failed": [report("C-01")],
        "error": [report("D-01")],
        "skipped": [report("A-01")],
    }
    title, lines = cases(reports)
    assert title.endswith("2 pass, 2 fail")
    assert lines == [
        "FAILED C-01: 1 failed, 1 passed",
        "FAILED D-01: 1 failed, 0 passed",
        "A-01: 2 passed (1 skipped)   B-01: 1 passed",
    ]
    assert cases({"passed": [report()]}) is None
