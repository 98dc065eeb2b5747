"""Every event that the source can log against ARCHITECTURE's table of them, read by the rule of Python's own parser."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
SOURCES = [
    ROOT / "launch.py",
    *(f for name in ("copyengine", "worker", "scheduler") for f in (ROOT / name).rglob("*.py")),
]
PLAIN = {"copyengine/wire/logs.py", "copyengine/device/host.py", "scheduler/http/server.py"}
"""Who may know of the standard logging: the log itself, who ends it, and who quiets a library's."""

PASSED_ON = "event"
"""The name of a variable that holds an event which another place names."""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a Log's method, of Say and of a supervisor's `say`, by what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Attribute(value=ast.Name(id="log"), attr=level):
                    yield level, node
                case ast.Name(id="Say"):
                    yield "say", node
                case ast.Attribute(value=ast.Name(id="self"), attr="_say") if len(node.args) == 2:
                    yield "say", node


def logged() -> dict[str, set[str]]:
    """The keys of each event, as far as they are written out."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for level, call in calls(ast.parse(path.read_text("utf-8"))):
            name = call.args[0]
            if isinstance(name, ast.Name) and name.id == PASSED_ON:
                continue
            assert isinstance(name, ast.Constant) and isinstance(name.value, str), f"{path}:{call.lineno}"
            keys = {keyword.arg for keyword in call.keywords if keyword.arg}
            if level == "failed":
                (words,) = (k.value for k in call.keywords if k.arg == "words")
                assert isinstance(words, ast.Constant)
                keys = (keys - {"words"}) | {"error", "at"} | ({"detail"} if words.value else set())
            found.setdefault(name.value, set()).update({"detail"} if level == "say" else keys)
    return found


def documented() -> dict[str, str]:
    """What the table says of each event."""
    section = ARCHITECTURE.partition("\n## Logs\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| `")]
    return {name: row[2] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_the_events_and_their_keys_are_those_of_the_table() -> None:
    source, table = logged(), documented()
    assert {*source, "library"} == set(table)
    for name, keys in source.items():
        unnamed = [key for key in keys if not re.search(rf"\b{key}\b", table[name])]
        assert not unnamed, f"{name}: {unnamed}"


def test_nobody_logs_past_the_log() -> None:
    """Nor in words: an event has a name."""
    for path in SOURCES:
        text, name = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
        assert name in PLAIN or not re.search(r"^\s*(import logging|from logging)", text, re.MULTILINE), name
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in logged())
