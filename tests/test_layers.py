"""The import direction of ARCHITECTURE.md, checked against the source and against what a process really loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RANK = {"kernels": 0, "copyengine": 1, "worker": 2, "scheduler": 3, "launch": 4}
SHARED_BY_COPYENGINE = (
    "wire",
    "device",
    "model_spec",
    "records",
    "checkpoint",
    "checksums",
    "budget",
    "placement",
    "planning",
    "available",
    "forecast",
    "link_rate",
    "protocol",
    "client",
    "ring",
    "sync",
)
"""Parts of copyengine that other processes may import: its protocol and client, and its libraries."""
CALLEE_ONLY = ("protocol", "client")


def sources() -> list[Path]:
    return [ROOT / "launch.py", *(p for top in list(RANK)[:4] for p in sorted((ROOT / top).rglob("*.py")))]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that `path` imports, lazily or not."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            for alias in node.names:
                target = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = target.with_suffix(".py").exists() or (target / "__init__.py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_point_one_way(path: Path) -> None:
    importer = module_of(path).split(".")
    for name in imports(path):
        top, *rest = name.split(".")
        if top not in RANK or top == importer[0]:
            continue
        assert RANK[top] < RANK[importer[0]], f"{path}: imports {name}"
        allowed: tuple[str, ...] = SHARED_BY_COPYENGINE if top == "copyengine" else CALLEE_ONLY
        if importer[0] == "launch":
            allowed = (
                *allowed,
                "config",
                "http",
                "client_cli",
                "check",
                "live_status",
                "port_claims",
                "preflight",
                "progress_line",
                "ready_block",
            )
        if importer == ["worker", "copy_engine_link"]:
            allowed = (*allowed, "thread", "config")  # --copy-engine thread: the server runs in the worker's process
        if top != "kernels":
            assert rest and rest[0] in allowed, f"{path}: imports {name} across a process line"
            assert rest[0] != "http" or rest[1:] == ["config"], f"{path}: imports {name} across a process line"


@pytest.mark.parametrize("path", [p for p in sources() if p.name == "protocol.py"], ids=module_of)
def test_protocols_import_only_the_standard_library_and_msgspec(path: Path) -> None:
    for name in imports(path):
        assert name.split(".")[0] in sys.stdlib_module_names | {"msgspec"}, f"{path}: imports {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "copyengine/wire").glob("*.py")), ids=module_of)
def test_the_wire_needs_only_zmq_and_msgspec(path: Path) -> None:
    allowed = sys.stdlib_module_names | {"msgspec", "zmq", "uvloop"}
    for name in imports(path):
        assert name.split(".")[0] in allowed or name.startswith("copyengine.wire"), f"{path}: imports {name}"


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_no_process_imports_transformers(path: Path) -> None:
    assert not any(name.split(".")[0] == "transformers" for name in imports(path))


@pytest.mark.parametrize("top", ["scheduler", "copyengine", "launch"])
def test_torch_stays_out_of(top: str) -> None:
    """Loads every module of the package in a fresh interpreter and looks at what came with it."""
    modules = [m for m in map(module_of, sources()) if m.split(".")[0] == top and not m.endswith("__main__")]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_no_file_is_named_for_nothing() -> None:
    names = {part for p in sources() for part in p.relative_to(ROOT).with_suffix("").parts}
    assert not names & {"utils", "util", "common", "helpers", "helper", "misc"}


RUNS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "code"}
"""Modules that make code or objects of what they read."""


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_nothing_runs_what_it_reads(path: Path) -> None:
    """No pickle in any form, no module of a name that is computed: what a checkpoint or a peer says stays data."""
    assert not {name.split(".")[0] for name in imports(path)} & RUNS_CODE
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id="eval" | "exec" | "compile" | "__import__")):
                raise AssertionError(f"{path}:{node.lineno}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                raise AssertionError(f"{path}:{node.lineno}")
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[argument, *_]):
                assert isinstance(argument, ast.Constant), f"{path}:{node.lineno}"
            case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=value):
                assert isinstance(value, ast.Constant) and value.value is False, f"{path}"
