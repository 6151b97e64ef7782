"""docs/RELIABILITY.md names only tests that exist, and leaves no number out.

Also the one promise of it that is a law about the code: no rank waits for another.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tests.test_tidy import Module, imports, name_of, parsed, within

REPO = Path(__file__).resolve().parents[1]
PAGES = ("RELIABILITY.md", "OPERATIONS.md")
TEST_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ANY_TEST = re.compile(r"tests/[\w/.]+::")

PEER = tuple(range(1, 21))
FIELD = (
    *(1, 3, 4, 5, 6, 7, 9, 10, 11, 12, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24, 25, 26, 27, 29, 30),
    *(31, 32, 33, 34, 36, 37, 38, 39, 40, 41, 42, 44, 45, 46, 47, 48, 49, 50, 52, 54, 55, 57, 58),
    *(59, 60, 61, 62, 64, 65, 67, 68, 69, 70, 71, 72, 73, 75, 76, 78, 79, 80),
)

COLLECTIVES = {"all_reduce", "all_gather", "all_to_all", "barrier", "broadcast", "reduce_scatter"}


@cache
def defined(file: str) -> frozenset[str]:
    """Names of tests at the top of a file: functions, classes, and machines by assignment."""
    names: set[str] = set()
    path = REPO / file
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(name for name in names if name.lower().startswith("test"))


def missing(text: str) -> list[str]:
    """What is named as a test and is none; also a name that is not written as an id."""
    found = [f"{file}::{name}" for file, name in TEST_ID.findall(text) if name not in defined(file)]
    if len(ANY_TEST.findall(text)) != len(TEST_ID.findall(text)):
        found.append("an id that is not `tests/FILE.py::NAME`")
    return found


def rows(text: str) -> list[list[str]]:
    """The numbered rows of every table, as cells."""
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in cells if row[0].strip().isdigit()]


def tables() -> tuple[list[list[str]], list[list[str]]]:
    text = (REPO / "docs" / "RELIABILITY.md").read_text()
    peer, field = text.split("\n## ")[1:]
    return rows(peer), rows(field)


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page: str) -> None:
    text = (REPO / "docs" / page).read_text()
    assert TEST_ID.findall(text)
    assert missing(text) == []


def test_no_number_is_left_out() -> None:
    peer, field = tables()
    assert tuple(int(row[0]) for row in peer) == PEER
    assert tuple(int(row[0]) for row in field) == FIELD


def test_every_row_has_a_test_or_says_that_nothing_is_built() -> None:
    peer, field = tables()
    assert all(len(row) == 4 for row in (*peer, *field))
    assert all(TEST_ID.search(row[3]) for row in peer)
    bare = [row[2] for row in field if not TEST_ID.search(row[3])]
    assert [text for text in bare if not re.match(r"not built \(part \d\)", text)] == []


def test_a_wrong_page_is_found() -> None:
    here = "tests/test_reliability.py"
    assert missing(f"`{here}::test_a_wrong_page_is_found`") == []
    assert missing(f"`{here}::test_that_is_not_there`")
    assert missing("`tests/no_such_file.py::test_x`")
    assert missing(f"{here}::test_a_wrong_page_is_found")


# ---- no rank waits for another


def collective(module: Module) -> list[str]:
    """Where ranks would have to take part together."""
    found = [name for name in imports(module) if within(name, "torch.distributed")]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += [name] if name in COLLECTIVES else []
    return [f"{module.name}: {name}" for name in found]


def test_no_rank_waits_for_another() -> None:
    """Every decision has one owner, the scheduler side or the server; workers copy and report."""
    files = sorted((REPO / "src" / "kvkeep" / "connectors").rglob("*.py"))
    assert {"worker_side.py", "scheduler_side.py", "loader.py"} <= {file.name for file in files}
    for file in files:
        assert collective(parsed(name_of(file), file.read_text())) == []
    for text in ("import torch.distributed as dist", "group.all_reduce(counts)", "barrier()"):
        assert collective(parsed("kvkeep.connectors.vllm.worker_side", text))
