"""`python -m copyengine` or `python -m worker` (the first argument) whose reads of experts never come back.

As from a network disk that is gone. Once one reads, a file called reading is in the directory for temporary ones. The
thread is one that Python's own end waits for, like the reader's.
"""

import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from copyengine.__main__ import main as copyengine_main
from worker.__main__ import main as worker_main


def stuck(*_: Any) -> int:
    """See above."""
    Path(tempfile.gettempdir(), "reading").touch()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(threading.Event().wait).result()
    raise AssertionError


if __name__ == "__main__":
    with patch("copyengine.loading.read_experts", stuck):
        sys.exit({"copyengine": copyengine_main, "worker": worker_main}[sys.argv[1]](sys.argv[2:]))
