"""The oracle's checkpoints and goldens, made once per session."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that transformers_oracle.py has filled."""
    directory = tmp_path_factory.mktemp("transformers_oracle")
    script = Path(__file__).parents[1] / "transformers_oracle.py"
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(directory)], cwd=directory, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return directory
