"""Windows' conditions for child processes, as far as a Linux can have them."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

CONDITIONS = {
    "PYTHONPATH": str(Path(__file__).parent / "windows_shim"),
    "PYTHONIOENCODING": "cp1252",  # what a pipe is written in there
    "USERNAME": "tester",  # always set there
    "PYTHONWARNDEFAULTENCODING": "1",  # a file opened without an encoding would be read as cp1252 too
}
"""Environment of a child process that lacks what Windows lacks (windows_shim/sitecustomize.py)."""
