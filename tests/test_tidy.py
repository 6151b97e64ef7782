"""The shape of the code as a test: import layers, sizes, names, docstrings, no machine paths.

A rule takes one module and returns what is wrong with it. Each rule runs over the tree, and over a
small sample that breaks it, so that no rule can quietly stop working.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import indent

import pytest

REPO = Path(__file__).resolve().parents[1]

# Rooms from the bottom up. A room imports its own row and the rows above it in this table.
TIERS = (
    ("__init__",),
    ("types", "errors"),
    ("core",),
    ("config", "metrics", "limits"),
    ("engine_flag",),
    ("shm", "children"),
    ("wire",),
    ("backends",),
    ("connect",),
    ("client",),
    ("connectors",),
    ("server",),
    ("dashboard",),
    ("bench",),
    ("testing",),
    ("doctor",),
    ("cli",),
    ("__main__",),
)
LEVEL = {room: level for level, tier in enumerate(TIERS) for room in tier}

# The laws that the order above does not already say.
CORE_MAY = {"core", "types", "errors"}
NEVER = {
    "server": ("kvkeep.client", "kvkeep.connectors", "torch"),
    "connectors": ("kvkeep.server",),
    "bench": ("kvkeep.server",),
    "core": ("asyncio", "io", "logging", "os", "random", "socket", "threading", "time", "torch"),
}
PICKLES = ("pickle", "_pickle", "cloudpickle", "dill", "shelve")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_P95_LINES = 40
BANNED_WORDS = {"manager", "managers", "helper", "helpers", "util", "utils"}
LEFTOVERS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.~])/(work|root|home|Users|opt|tmp/w)/\w")
PINNED = re.compile(r"[a-z0-9-]+==[\w.]+(\s*;.*)?")
TEXT_SUFFIXES = {"", ".py", ".md", ".toml", ".txt", ".sh", ".yml", ".json", ".html", ".js", ".css"}
SKIPPED_DIRS = {".git", ".venv", "dist", "node_modules", "__pycache__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file: its dotted name, its text, and the text parsed."""

    name: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The first part below `kvkeep`; `__init__` for the package itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    @property
    def is_kvkeep(self) -> bool:
        """Whether this file ships, or is a test or script."""
        return self.name.split(".")[0] == "kvkeep"


Rule = Callable[[Module], list[str]]


def parsed(name: str, text: str) -> Module:
    return Module(name, text, ast.parse(text))


def name_of(path: Path) -> str:
    """Dotted name; a package's `__init__` keeps that last part, so relative imports resolve."""
    inside = path.relative_to(REPO / "src" if "src" in path.relative_to(REPO).parts else REPO)
    return ".".join(inside.with_suffix("").parts)


@cache
def modules() -> tuple[Module, ...]:
    folders = ("src", "tests", "scripts")
    files = [file for folder in folders for file in sorted((REPO / folder).rglob("*.py"))]
    return tuple([parsed(name_of(file), file.read_text()) for file in files])


def text_files() -> Iterator[tuple[str, str]]:
    for path in sorted(REPO.rglob("*")):
        inside = path.relative_to(REPO)
        hidden_cache = inside.parts[0].startswith(".") and inside.parts[0] != ".ci"
        if hidden_cache or SKIPPED_DIRS & set(inside.parts) or not path.is_file():
            continue
        if path.suffix in TEXT_SUFFIXES:
            yield str(inside), path.read_text()


# ---- what a module imports


def _from_import(module: Module, node: ast.ImportFrom) -> Iterator[str]:
    base = module.name.split(".")[: -node.level] if node.level else []
    source = ".".join([*base, *([node.module] if node.module else [])])
    if source == "kvkeep" or not node.module:  # the names are rooms or modules themselves
        yield from (f"{source}.{alias.name}" for alias in node.names)
    else:
        yield source


def _called_import(node: ast.Call) -> Iterator[str]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in {"import_module", "__import__"}:
        first = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        yield from (name for name in first if isinstance(name, str))


def imports(module: Module) -> set[str]:
    """Every module named by an import, wherever it stands, also by `import_module("...")`."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(_from_import(module, node))
        elif isinstance(node, ast.Call):
            found.update(_called_import(node))
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def rooms_imported(module: Module) -> set[str]:
    """Rooms of kvkeep that a module imports; a plain name of the package counts as `__init__`."""
    parts = [name.split(".") for name in imports(module) if within(name, "kvkeep")]
    named = {part[1] if len(part) > 1 else "__init__" for part in parts}
    return {"__init__" if name.startswith("__version") else name for name in named}


# ---- the rules


def imports_point_down(module: Module) -> list[str]:
    if not module.is_kvkeep:
        return []
    unknown = ({module.room} | rooms_imported(module)) - LEVEL.keys()
    if unknown:
        return [f"{module.name}: give {sorted(unknown)} a place in TIERS"]
    up = {room for room in rooms_imported(module) if LEVEL[room] > LEVEL[module.room]}
    return [f"{module.name} imports upwards: {room}" for room in sorted(up)]


def core_is_alone(module: Module) -> list[str]:
    if not module.is_kvkeep or module.room != "core":
        return []
    return [f"{module.name} imports {room}" for room in sorted(rooms_imported(module) - CORE_MAY)]


def never_imported(module: Module) -> list[str]:
    banned = PICKLES + (NEVER.get(module.room, ()) if module.is_kvkeep else ())
    hits = {name for name in imports(module) for package in banned if within(name, package)}
    return [f"{module.name} imports {name}" for name in sorted(hits)]


def files_are_short(module: Module) -> list[str]:
    lines = len(module.text.splitlines())
    return [f"{module.name}: {lines} lines"] if lines > MAX_FILE_LINES else []


def functions(module: Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            yield f"{module.name}.{node.name}", (node.end_lineno or 0) - node.lineno + 1


def functions_are_short(module: Module) -> list[str]:
    long = [(name, lines) for name, lines in functions(module) if lines > MAX_FUNCTION_LINES]
    return [f"{name}: {lines} lines" for name, lines in long]


def names_say_what(module: Module) -> list[str]:
    parts = module.name.split(".")
    bad = [p for p in parts if p == "common" or BANNED_WORDS & set(p.split("_"))]
    return [f"{module.name}: '{part}' says nothing" for part in bad]


def docstring_first(module: Module) -> list[str]:
    return [] if ast.get_docstring(module.tree) else [f"{module.name}: no docstring"]


def nothing_left_over(module: Module) -> list[str]:
    lines = enumerate(module.text.splitlines(), start=1)
    return [f"{module.name}:{number}" for number, line in lines if LEFTOVERS.search(line)]


RULES: tuple[Rule, ...] = (
    imports_point_down,
    core_is_alone,
    never_imported,
    files_are_short,
    functions_are_short,
    names_say_what,
    docstring_first,
    nothing_left_over,
)


def rule_id(rule: Rule) -> str:
    return rule.__name__


def p95(sizes: list[int]) -> int:
    return sorted(sizes)[math.ceil(0.95 * len(sizes)) - 1] if sizes else 0


def machine_paths(text: str) -> list[str]:
    return [line for line in text.splitlines() if MACHINE_PATHS.search(line)]


def unpinned(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and line[0] != "#" and not PINNED.fullmatch(line)]


# ---- over the tree


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_the_tree_keeps(rule: Rule) -> None:
    found = [problem for module in modules() for problem in rule(module)]
    assert not found, "\n".join(found)


def test_most_functions_fit_a_screen() -> None:
    shipped = [module for module in modules() if module.is_kvkeep]
    assert p95([lines for module in shipped for _, lines in functions(module)]) <= MAX_P95_LINES


def test_no_machine_paths() -> None:
    found = [f"{name}: {line}" for name, text in text_files() for line in machine_paths(text)]
    assert not found, "\n".join(found)


def test_requirements_are_pinned_and_name_no_place() -> None:
    files = sorted((REPO / "requirements").glob("*.txt"))
    assert files
    found = [f"{file.name}: {line}" for file in files for line in unpinned(file.read_text())]
    assert not found, "\n".join(found)


def test_the_walk_sees_the_tree() -> None:
    seen = {module.name for module in modules()}
    assert {"kvkeep.__init__", "kvkeep.core.keys", "tests.test_tidy"} <= seen
    assert {"Makefile", ".ci/run", "pyproject.toml"} <= {name for name, _ in text_files()}


# ---- each rule can fail

LONG = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES

BREAKS: tuple[tuple[Rule, str, str], ...] = (
    (imports_point_down, "kvkeep.wire.frames", "from kvkeep.server.rpc import serve"),
    (imports_point_down, "kvkeep.wire.frames", "def f():\n    from kvkeep import client"),
    (imports_point_down, "kvkeep.wire.frames", "from ..server import rpc"),
    (imports_point_down, "kvkeep.wire.frames", "from .. import server"),
    (imports_point_down, "kvkeep.wire.__init__", "from ..server import rpc"),
    (imports_point_down, "kvkeep.attic.thing", "x = 1"),
    (imports_point_down, "kvkeep.cli.__init__", "import kvkeep.attic"),
    (core_is_alone, "kvkeep.core.keys", "import kvkeep.config"),
    (core_is_alone, "kvkeep.core.keys", "from kvkeep import __version__"),
    (never_imported, "kvkeep.core.keys", "from time import monotonic"),
    (never_imported, "kvkeep.server.rpc", "import kvkeep.client"),
    (never_imported, "kvkeep.server.rpc", "from kvkeep.connectors import blocks"),
    (never_imported, "kvkeep.server.rpc", "import torch.cuda"),
    (never_imported, "kvkeep.server.rpc", "import importlib\nimportlib.import_module('torch')"),
    (never_imported, "kvkeep.connectors.vllm.plugin", "from kvkeep.server import run"),
    (never_imported, "kvkeep.bench.engine", "from kvkeep import server"),
    (never_imported, "tests.test_x", "from pickle import loads"),
    (files_are_short, "kvkeep.types", "x = 1\n" * (MAX_FILE_LINES + 1)),
    (functions_are_short, "kvkeep.types", LONG),
    (functions_are_short, "kvkeep.types", "class A:\n" + indent("async " + LONG, "    ")),
    (names_say_what, "kvkeep.core.common", ""),
    (names_say_what, "kvkeep.utils.text", ""),
    (names_say_what, "kvkeep.server.lease_manager", ""),
    (docstring_first, "kvkeep.types", "x = 1"),
    (nothing_left_over, "kvkeep.types", "x = 1  # TO" + "DO"),
    (nothing_left_over, "kvkeep.types", "# FIX" + "ME: soon"),
)

KEEPS = (
    ("kvkeep.core.common_prefix", '"""Doc."""\nfrom kvkeep.types import RowSpec'),
    ("kvkeep.core.keys", '"""Doc."""\nfrom . import layout\nfrom ..errors import KVKeepError'),
    ("kvkeep.cli.__init__", '"""Doc."""\nfrom kvkeep import __version__\nimport kvkeep.server'),
    ("kvkeep.connectors.blocks", '"""Doc."""\nimport torch\nfrom kvkeep.client import Client'),
)


@pytest.mark.parametrize(("rule", "name", "text"), BREAKS, ids=[rule_id(b[0]) for b in BREAKS])
def test_a_broken_sample_is_found(rule: Rule, name: str, text: str) -> None:
    assert rule(parsed(name, text))


@pytest.mark.parametrize(("name", "text"), KEEPS)
def test_a_sound_sample_passes(name: str, text: str) -> None:
    assert not [problem for rule in RULES for problem in rule(parsed(name, text))]


def test_every_rule_has_a_broken_sample() -> None:
    assert {rule for rule, _, _ in BREAKS} == set(RULES)


def test_p95_counts_from_the_top() -> None:
    assert p95([1] * 95 + [99] * 5) == 1
    assert p95([1] * 94 + [99] * 6) == 99


@pytest.mark.parametrize("folder", ["work", "root", "home", "opt", "Users"])
def test_a_machine_path_is_found(folder: str) -> None:
    assert machine_paths(f"see /{folder}/me/thing")
    assert not machine_paths(f"see src/{folder}/me and https://example.org/{folder}/me")


@pytest.mark.parametrize(
    "line", ["torch", "torch>=2", "torch @ file:///a", "--find-links a", "torch==2.13.0+cpu"]
)
def test_a_loose_requirement_is_found(line: str) -> None:
    assert unpinned(f"# comment\n\nmsgspec==0.23.0\n{line}\n") == [line]
