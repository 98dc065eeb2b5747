"""For all tests: how many threads compute, no time limit per hypothesis example, and what transformers makes, once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

# Read when torch is loaded, here and in the processes of tests. Two of pytest's processes with two threads each on two
# cores waited for each other's, spinning: 17 and 49 s for tests that take 2 s with one (beside other load, 2026-11).
THREADS = max(1, ((os.cpu_count() or 1) - 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

hypothesis.settings.register_profile("slotstream", deadline=None)
hypothesis.settings.load_profile("slotstream")

MadeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all processes of this run of pytest share; pytest-xdist gives each one below it."""
    directory = tmp_path_factory.getbasetemp()
    return directory.parent if "PYTEST_XDIST_WORKER" in os.environ else directory


@pytest.fixture(scope="session")
def made_once(run_directory: Path) -> MadeOnce:
    """Gives the directory of a name, which a function has filled in the first process of this run that asked for it."""

    def made(name: str, fill: Callable[[Path], None]) -> Path:
        directory, done = run_directory / name, run_directory / f"{name}.done"
        with FileLock(run_directory / f"{name}.lock"):
            if not done.exists():
                directory.mkdir(exist_ok=True)
                fill(directory)
                done.touch()
        return directory

    return made


def _goldens(directory: Path) -> None:
    script = Path(__file__).parent / "worker" / "transformers_oracle.py"
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(directory)], cwd=directory, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def goldens(made_once: MadeOnce) -> Path:
    """The directory that transformers_oracle.py has filled. Nobody writes into it."""
    return made_once("transformers_oracle", _goldens)
