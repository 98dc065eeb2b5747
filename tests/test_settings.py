"""Every timeout, bound and retry has a name and a reason, and every wait a deadline: the source, as its parser has it.

ARCHITECTURE's table of deadlines and bounds has the names and values that the source has.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
PACKAGES = ("copyengine", "kernels", "worker", "scheduler")
SOURCES = [ROOT / "launch.py", *sorted(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))]

WAITS = {"sleep", "nap", "wait", "wait_for", "timeout", "timeout_at", "join", "poll", "result", "acquire", "call_later"}
WAITS |= {
    "call_at",
    "settimeout",
    "listen",
    "setsockopt",
    "Semaphore",
    "BoundedSemaphore",
    "ThreadPoolExecutor",
    "Queue",
}
BOUNDS = {
    "timeout",
    "maxsize",
    "backlog",
    "limit",
    "retries",
    "max_workers",
    "deadline_s",
    "grace_s",
    "maxlen",
    "linger",
}
"""What is called with a time or a bound, and the keywords by which one is given."""

BOUND_NAME = re.compile(
    r"(^|_)(MAX|MOST|LIMIT|RETRY|RETRIES|DEADLINE|TIMEOUT)(_|$)|_(S|MS|US|NBYTES|TOKENS|CHARS|PIECES|REPLIES|LOOKS|THREADS)$"
)
"""Names of constants that say when something ends or how much of it there may be."""


def parsed() -> Iterator[tuple[str, ast.Module, list[str]]]:
    for path in SOURCES:
        text = path.read_text("utf-8")
        yield path.relative_to(ROOT).as_posix(), ast.parse(text), text.splitlines()


def called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def numbers(node: ast.expr) -> list[float]:
    """Literals in it but for 0, which is no wait and no bound, and 1, which is one thing; none beside a name."""
    if any(isinstance(each, ast.Name | ast.Attribute) for each in ast.walk(node)):
        return []
    found = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return [n for n in found if isinstance(n, int | float) and not isinstance(n, bool) and n not in (0, 1)]


def unnamed_numbers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each number that is given to a wait or as a bound without a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given: list[Any] = list(node.args) if called(node) in WAITS else []
            given += [keyword.value for keyword in node.keywords if keyword.arg in BOUNDS]
            if any(
                numbers(value)
                for value in given
                if not isinstance(value, ast.Call | ast.Lambda | ast.GeneratorExp | ast.Subscript)
            ):
                yield node.lineno, ast.unparse(node)
        match node:
            case ast.For(target=ast.Name(id="_"), iter=ast.Call(func=ast.Name(id="range"), args=given)):
                if any(map(numbers, given)):
                    yield node.lineno, ast.unparse(node.iter)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            pairs = [
                *zip(arguments, node.args.defaults, strict=True),
                *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
            ]
            for argument, default in pairs:
                if default and numbers(default) and BOUND_NAME.search(argument.arg.upper()):
                    yield node.lineno, f"{node.name}({argument.arg}={ast.unparse(default)})"


def constants(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line and name of each numeric constant of a module, and whether a reason follows right under it."""
    body = tree.body
    for i, node in enumerate(body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name.isupper():
                pass
            case _:
                continue
        if not is_number(value):
            continue
        after = body[i + 1] if i + 1 < len(body) else None
        told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        yield node.lineno, name, told


def is_number(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=int() | float()):
            return not isinstance(value.value, bool)
        case ast.BinOp(left=left, right=right):
            return is_number(left) or is_number(right)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
    return False


def endless_waits(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each wait that nothing but its event ends, of threads and of tasks."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        bare = not node.args and not any(keyword.arg in BOUNDS for keyword in node.keywords)
        if node.func.attr in ("join", "wait", "get", "result", "acquire") and bare:
            yield node.lineno, ast.unparse(node)


ENDLESS = {
    # what a task of asyncio awaits: it is cancelled when its process or its connection ends
    "copyengine/wire/process.py: orders.stop.wait()": "the process runs until then",
    "copyengine/wire/rpc_client.py: replies.get()": "inside asyncio.timeout(deadline_s)",
    "copyengine/wire/rpc_client.py: self._connected.wait()": "the same",
    "copyengine/wire/rpc_client.py: arrived.result()": "of a future that is done",
    "scheduler/__main__.py: orders.drain.wait()": "the parent's drain has a deadline of its own",
    "scheduler/http/__main__.py: orders.drain.wait()": "the same",
    "scheduler/http/answering.py: self._stirred.wait()": "every pump ends by the client's SILENCE_S, and stirs",
    "scheduler/http/front.py: self._idle.wait()": "the parent's drain has a deadline of its own",
    "scheduler/lane.py: self._dead.wait()": "`run` dies once its worker is lost, which is set before",
    "scheduler/lane.py: (self._dead if self.alive else self._lives).wait()": "a lane lives as long as the process",
    "scheduler/lane.py: self._lives.wait()": "until the parent has a worker for it; requests are refused meanwhile",
    "scheduler/lane.py: event.wait()": "work, or the worker's loss",
    "scheduler/live_status.py: self._wake.wait()": "inside asyncio.timeout",
    "scheduler/rejoin.py: peers.get()": "what the parent says, while the process runs",
    "scheduler/server.py: self._idle.wait()": "in a drain, whose deadline is the parent's; else inside asyncio.timeout",
    "scheduler/ticket.py: self._over.wait()": "inside asyncio.timeout(KEEPALIVE_S)",
    "worker/load.py: self._link.lost.wait()": "until the copy engine is lost, or the load is given up",
    "worker/server.py: watcher.get()": "progress, while its load runs",
    # results of what is done already
    "copyengine/checkpoint/parallel.py: future.result()": "the pool has ended",
    "copyengine/loading.py: task.result()": "it is done",
    "copyengine/wire/process.py: work.result()": "it is done",
    "copyengine/wire/rpc_server.py: (end if end in done else serving).result()": "it is done",
    "scheduler/__main__.py: endless.result()": "it is done",
    "scheduler/http/__main__.py: server.result()": "it is done",
    "scheduler/http/answering.py: pump.result()": "it is done",
    "scheduler/http/app.py: working.result()": "it is done",
    "scheduler/timed_threads.py: working.result()": "it is done",
    "worker/engine.py: self._windows.get()": "the queue is not empty, and nobody else takes from it",
    "kernels/online_softmax.py: tile.result()": "no wait: what a sum comes to",
    # threads
    "copyengine/checkpoint/reader.py: unused.get()": "there are as many as threads",
    "copyengine/copier.py: self._wake.wait()": "an idle copy loop, woken by a step, a call and the stop",
    "copyengine/sync.py: self._lock.acquire()": "nobody else has this lock: it is a fence",
    "copyengine/wire/child.py: self._process.wait()": "a thread that tells of the end, however late it comes",
    "worker/compute.py: self._calls.get()": "the compute thread, a daemon, waits for work",
    "worker/device_slots.py: self._watch.wait()": "StepWatch.wait has a deadline in it",
}
"""Waits without a deadline of their own, and what ends each."""


def test_no_number_without_a_name_is_a_wait_or_a_bound() -> None:
    found = [f"{name}:{line} {text}" for name, tree, _ in parsed() for line, text in unnamed_numbers(tree)]
    assert not found, "\n".join(found)


def test_every_named_time_and_bound_says_why() -> None:
    """In a docstring right under it."""
    found = [
        f"{name}:{line} {constant}"
        for name, tree, _ in parsed()
        for line, constant, told in constants(tree)
        if BOUND_NAME.search(constant) and not told
    ]
    assert not found, "\n".join(found)


def test_every_wait_has_a_deadline_or_a_reason_for_none() -> None:
    found = {f"{name}: {text}" for name, tree, _ in parsed() for _, text in endless_waits(tree)}
    assert found == set(ENDLESS)


def table() -> dict[str, tuple[float, str]]:
    """Value and file of each name in ARCHITECTURE's table."""
    section = ARCHITECTURE.partition("\n### Deadlines and bounds\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([A-Z_]+)`[^|]*\| ([\d.,]+)[^|]*\| `([\w/.]+)` \|", section, re.MULTILINE)
    return {f"{file}:{name}": (float(value.replace(",", "")), file) for name, value, file in rows}


def value_of(name: str) -> float | None:
    """What the source says of `file:NAME`; None if nothing."""
    file, _, constant = name.partition(":")
    for node in ast.parse((ROOT / file).read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == constant and is_number(value):
                return float(eval(compile(ast.Expression(value), file, "eval"), {}))
    return None


def test_the_table_of_deadlines_has_the_values_of_the_source() -> None:
    for name, (value, _) in table().items():
        assert value_of(name) == pytest.approx(value), name


def test_every_deadline_of_the_processes_is_in_the_table() -> None:
    """Those in seconds that end a wait; sizes of pieces and paces of loops are told where they are."""
    deadlines = {
        f"{name}:{constant}"
        for name, tree, _ in parsed()
        for _, constant, _ in constants(tree)
        if constant.endswith("_S") and not PACES.search(constant) and not name.startswith("kernels/")
    }
    assert deadlines == set(table()) - BOUNDS_IN_TABLE, deadlines ^ (set(table()) - BOUNDS_IN_TABLE)


PACES = re.compile(
    r"^((BAR|BUSY|DEAD_POLL|EVERY|LOOK|MAX_NAP|MIN_NAP|MEASURED|POLL|PROGRESS|QUIET|STEADY|YIELD)"
    r"|(RAISE_EVERY|FINAL_RETRY|WATCH|FRESH|SHARED|RETRY_\w+))_S$"
)
"""How often something is done: nothing ends when they are over."""

BOUNDS_IN_TABLE = {name for name in table() if not name.endswith("_S")}


@pytest.mark.parametrize(
    "source",
    [
        "time.sleep(5)",
        "queue.get(timeout=2.5)",
        "for _ in range(3): pass",
        "def f(deadline_s=30.0): pass",
        "Queue(maxsize=8)",
    ],
)
def test_a_number_in_the_middle_of_the_code_is_found(source: str) -> None:
    assert list(unnamed_numbers(ast.parse(source)))
    assert not list(unnamed_numbers(ast.parse(re.sub(r"[\d.]+", "NAMED", source))))


def test_a_bound_without_a_reason_and_a_wait_without_an_end_are_found() -> None:
    assert list(constants(ast.parse("A_S = 1.0\nB = 2\n'Why.'"))) == [(1, "A_S", False), (2, "B", True)]
    assert [text for _, text in endless_waits(ast.parse("a.join()\nb.wait(1)\nc.get(timeout=N)\n', '.join(x)"))] == [
        "a.join()"
    ]
