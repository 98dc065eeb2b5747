"""Result files: one per machine, month and benchmark, with everything needed to read the figures again."""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "numpy", "pyzmq", "msgspec")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def conditions(machine: str = "", packages: Sequence[str] = PACKAGES) -> str:
    """Command, machine (this one's processor if none is named), versions and commit."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    commit = output("git", "rev-parse", "--short=12", "HEAD") or "unknown"
    changed = " with uncommitted changes" if output("git", "status", "--porcelain", "--untracked-files=no") else ""
    module = Path(sys.argv[0]).stem
    return "\n".join(
        (
            f"- command: `{shlex.join(['python', '-m', f'tests.bench.{module}', *sys.argv[1:]])}`",
            f"- machine: {machine or f'{cpu_name()}, {os.cpu_count()} cores, {platform.system()}'}",
            f"- versions: Python {platform.python_version()}, {versions}",
            f"- commit: {commit}{changed}, {time.strftime('%Y-%m-%d')}",
        )
    )


def gpu_conditions(name: str) -> str:
    """The same on a machine with the GPU `name`, for a benchmark that needs torch and triton alone."""
    return conditions(f"{name}, driver {gpu_driver()}", ("torch", "triton"))


def keep(name: str, text: str) -> Path:
    """Write results/`machine`_`month`_`name`.md; its path."""
    path = path_of(name)
    path.write_text(text + "\n", "utf-8")
    return path


def path_of(name: str, machine: str = "") -> Path:
    """results/`machine`_`month`_`name`.md; without a machine's name it is this one's processor."""
    machine = "-".join("".join(c if c.isalnum() else " " for c in (machine or cpu_name()).lower()).split())
    return RESULTS / f"{machine}_{time.strftime('%Y%m')}_{name}.md"


def gpu_name() -> str:
    """The first GPU, as its driver names it; nothing without one."""
    return _of_first_gpu("name")


def gpu_driver() -> str:
    """Its driver's version."""
    return _of_first_gpu("driver_version") or "unknown"


def _of_first_gpu(field: str) -> str:
    """What the driver says of it; nothing without one."""
    return output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").partition("\n")[0]


def gpu_nbytes(field: str) -> list[int]:
    """`field`, such as "memory.free", of each GPU that CUDA_VISIBLE_DEVICES leaves visible; none if nobody tells."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    only = ("-i", visible) if visible else ()
    told = output("nvidia-smi", *only, f"--query-gpu={field}", "--format=csv,noheader,nounits").split()
    return [int(mib) << 20 for mib in told if mib.isdigit()]


def cpu_name() -> str:
    """The processor, as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


OUTPUT_S = 30.0
"""Seconds that a command may take which says something of the machine."""


def output(*command: str) -> str:
    """What a command prints; nothing if it fails, takes too long or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=OUTPUT_S)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
