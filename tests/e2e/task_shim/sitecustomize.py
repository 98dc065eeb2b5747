"""Tells how many asyncio tasks a Python has, in a file of the folder TASK_COUNTS named by its process id.

It runs at the start of every Python that has this folder in PYTHONPATH, and has the sitecustomize of another folder
behind it there run too.
"""

import asyncio
import contextlib
import importlib.util
import os
import sys
import threading
import time
from pathlib import Path

LOOK_S = 0.1


def tell(directory: Path) -> None:
    """Whenever the number has changed."""
    told = -1
    while True:
        time.sleep(LOOK_S)
        with contextlib.suppress(RuntimeError, OSError):  # the set changes meanwhile, or the test is over
            tasks = sum(not task.done() for task in list(_tasks()))
            if tasks != told:
                part = directory / f"{os.getpid()}.part"
                part.write_text(str(tasks), "utf-8")
                part.replace(directory / str(os.getpid()))
                told = tasks


def _tasks() -> "set[asyncio.Task[object]]":
    found = getattr(asyncio.tasks, "_all_tasks", None)  # until 3.11
    return found if found is not None else asyncio.tasks._scheduled_tasks  # type: ignore[attr-defined, no-any-return]


def run_the_next() -> None:
    """Only the first one in the path is run by Python itself."""
    here = Path(__file__).resolve().parent
    for place in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        path = Path(place) / "sitecustomize.py"
        if place and Path(place).resolve() != here and path.exists():
            sys.path.insert(0, place)
            spec = importlib.util.spec_from_file_location("next_sitecustomize", path)
            assert spec and spec.loader
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


if "TASK_COUNTS" in os.environ:
    threading.Thread(target=tell, args=(Path(os.environ["TASK_COUNTS"]),), name="task-counts", daemon=True).start()
run_the_next()
