"""What runs on Windows too, searched for in the product's source: no means that only POSIX has, no dependency that does
not install there, no file read in whatever encoding the system prefers. What mypy sees of win32 is in tests/check.py.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.e2e.windows_shim.posix_only import LOOP_METHODS, MODULES, OS_NAMES, SIGNAL_CALLS, SIGNALS
from tests.test_layers import RANK, ROOT, imports, module_of, sources

WORDS = ("ipc://", "fork", "forkserver", "/dev/", "/proc", "/sys/", "/tmp", "/etc/", "SIGHUP", "SIGKILL", "SIGUSR1")
KEYWORDS = ("preexec_fn", "pass_fds", "start_new_session", "process_group", "umask")
"""Options of Popen that Windows refuses or ignores."""

ALLOWED = {
    ("copyengine/wire/loop.py", "uvloop"): "the selector loop where it is not installed",
    ("copyengine/wire/child.py", "process_group"): "Windows has its own branch",
    ("copyengine/device/ledger.py", "getuid"): "behind hasattr; by the user's name elsewhere",
    ("copyengine/sync.py", "sched_yield"): "behind hasattr",
    ("copyengine/device/host.py", "posix_fallocate"): "behind hasattr; Windows takes the memory of a segment by itself",
    ("copyengine/checkpoint/files.py", "posix_fadvise"): "behind hasattr; the system reads ahead by itself",
    ("copyengine/checkpoint/files.py", "preadv"): "behind hasattr; one place after the other is filled",
    ("copyengine/checkpoint/direct.py", "O_DIRECT"): "behind getattr; files are read as any others without",
    ("copyengine/available.py", "/proc"): "where it is not there are no control groups",
    ("copyengine/available.py", "/sys/"): "likewise",
    ("scheduler/http/connection.py", "resource"): "caught where there is none, since there is no such limit",
    ("launch.py", "SIGHUP"): "behind hasattr",
}
"""(file, what): why it does no harm."""


def posix_only(path: Path) -> Iterator[str]:
    """Names and words in `path` that mean nothing on Windows."""
    tree = ast.parse(path.read_text("utf-8"))
    yield from (name for name in imports(path) if name.split(".")[0] in (*MODULES, "uvloop"))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in (*OS_NAMES, "kill"):
                yield name
            case ast.Attribute(value=ast.Name(id="signal"), attr=name) if posix_signal(name):
                yield name
            case ast.Attribute(attr=name) if name in (*LOOP_METHODS, "AF_UNIX", "create_subprocess_exec"):
                yield name
            case ast.ImportFrom(module="os" | "signal" | "socket", names=names):
                yield from (alias.name for alias in names if alias.name in OS_NAMES or posix_signal(alias.name))
            case ast.keyword(arg=name) if name in KEYWORDS:
                yield str(name)
            case ast.Constant(value=str(text)) if text in (*KEYWORDS, *OS_NAMES):
                yield text
            case ast.Constant(value=str(text)):
                yield from (word for word in WORDS if text == word or ("/" in word and word in text))


def posix_signal(name: str) -> bool:
    """Whether the module `signal` of Windows lacks `name`."""
    number = name.startswith("SIG") and not name.startswith("SIG_") and name not in SIGNALS
    return number or name in SIGNAL_CALLS


def test_every_means_that_only_posix_has_is_accounted_for() -> None:
    found = {(path.relative_to(ROOT).as_posix(), name) for path in sources() for name in posix_only(path)}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "line",
    [
        "import fcntl",
        "from os import fork",
        "import os; os.fork()",
        "import os; os.kill(1, 9)",
        "import signal; signal.signal(signal.SIGUSR1, print)",
        "loop.add_signal_handler(2, print)",
        "socket.bind('ipc:///tmp/x')",
        "get_context('fork')",
        "open('/dev/shm/x', 'rb')",
        "getattr(os, 'getuid')()",
        "Popen([], preexec_fn=print)",
    ],
)
def test_the_search_finds_what_it_looks_for(line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(line, "utf-8")
    assert list(posix_only(path))


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_text_is_read_and_written_in_a_stated_encoding(path: Path) -> None:
    """Windows' own would be that of the country."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id="open"), args=[_, ast.Constant(value=str(mode)), *_]) if "b" in mode:
                continue
            case ast.Call(func=ast.Name(id="open"), keywords=keywords):
                assert "encoding" in {keyword.arg for keyword in keywords}, f"{path}:{node.lineno}"
            case ast.Call(func=ast.Attribute(attr="read_text" | "write_text" as name), args=args, keywords=keywords):
                stated = len(args) > (name == "write_text") or "encoding" in {keyword.arg for keyword in keywords}
                assert stated, f"{path}:{node.lineno}"


def requirements() -> list[Requirement]:
    """Those of the product itself, without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [Requirement(text) for text in project["dependencies"]]


def wanted(platform: str) -> set[str]:
    """Names of the distributions that pip installs on `platform`."""
    here = {"sys_platform": platform, "os_name": "nt" if platform == "win32" else "posix"}
    return {one.name for one in requirements() if one.marker is None or one.marker.evaluate(here)}


def test_each_platform_is_asked_for_what_it_has() -> None:
    """Against what is published: Triton for Linux only, uvloop for all but Windows."""
    everything = {one.name for one in requirements()}
    assert wanted("linux") == everything
    assert wanted("darwin") == everything - {"triton"}
    assert wanted("win32") == everything - {"triton", "uvloop"}


OPTIONAL = {
    "uvloop": "copyengine/wire/loop.py does without",
    "triton": "the kernels for a GPU, imported when one is used",
    "cuda": "the extra `cuda`, imported when a GPU is looked for",
    "sgl_kernel": "to compare with",
}
"""Modules that the product can do without, and how."""

BEHIND = {"uvicorn.protocols.http.httptools_impl": "httptools"}
"""Modules of other packages that do not work without a further one."""


def test_what_is_imported_is_asked_for_on_windows() -> None:
    known = {name.replace("-", "_") for name in wanted("win32")} - {"pyzmq"} | {"zmq"}
    own = {*RANK, *sys.stdlib_module_names}
    named = {name for path in sources() for name in imports(path)}
    imported = {name.split(".")[0] for name in named | {BEHIND[name] for name in named & set(BEHIND)}} - own
    assert imported <= known | set(OPTIONAL)
    assert known <= imported, "a dependency that nothing imports"
