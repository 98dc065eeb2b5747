"""Everything a change must pass: `python -m tests.check`; with `--gpu` also the tests that need a CUDA device, with
`--no-tests` all but pytest, for a CI that ran it."""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

STATIC: tuple[tuple[str, ...], ...] = (
    ("ruff", "format", "--check", "."),
    ("ruff", "check", "."),
    ("mypy",),
    ("mypy", "--platform", "win32", "launch.py", "copyengine", "kernels", "scheduler", "worker"),
)
"""Run as `python -m ...`; mypy reads its packages from pyproject.toml."""


def commands(tests: bool, gpu: bool) -> list[tuple[str, ...]]:
    """The modules to run with their arguments, in order."""
    on_cpu = [("pytest", "-n", "3", "--dist", "loadfile")] if tests else []
    on_gpu = [("pytest", "-m", "gpu")] if gpu else []
    return [*STATIC, *on_cpu, *on_gpu]


def main(argv: Sequence[str]) -> int:
    """Run all commands, also after one failed; 0 if each passed."""
    flags = argparse.ArgumentParser(prog="python -m tests.check", description="Run all that a change must pass.")
    flags.add_argument("--gpu", action="store_true", help="also the tests that need a CUDA device")
    flags.add_argument("--no-tests", action="store_true", help="format, lint and types alone")
    asked = flags.parse_args(argv)
    failed = []
    for command in commands(tests=not asked.no_tests, gpu=asked.gpu):
        print(f"== {' '.join(command)}", flush=True)
        start = time.monotonic()
        code = subprocess.run([sys.executable, "-m", *command], check=False).returncode
        print(f"== {'ok' if code == 0 else f'failed ({code})'} in {time.monotonic() - start:.0f} s", flush=True)
        if code:
            failed.append(" ".join(command))
    if failed:
        print(f"failed: {'; '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
