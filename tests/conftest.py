"""For all tests: no time limit per hypothesis example, and the oracle's checkpoints and goldens, made once."""

import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("slotstream", deadline=None)
hypothesis.settings.load_profile("slotstream")


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that transformers_oracle.py has filled."""
    directory = tmp_path_factory.mktemp("transformers_oracle")
    script = Path(__file__).parent / "worker" / "transformers_oracle.py"
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(directory)], cwd=directory, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return directory
