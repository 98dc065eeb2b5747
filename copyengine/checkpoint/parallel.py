"""Work cut into pieces for a few threads: numpy and file reads let go of the interpreter's lock."""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event
from typing import TypeVar

T = TypeVar("T")


def run_all(work: Sequence[Callable[[], T]], threads: int, name: str) -> list[T]:
    """What each piece of `work` returns, in its order. After an exception, which is raised, no piece is begun."""
    failed = Event()

    def run(piece: Callable[[], T]) -> T:
        if failed.is_set():
            raise CancelledError
        try:
            return piece()
        except BaseException:
            failed.set()
            raise

    if not work:
        return []
    with ThreadPoolExecutor(min(threads, len(work)), name) as pool:
        futures = [pool.submit(run, piece) for piece in work]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, CancelledError):
            raise error
    return [future.result() for future in futures]
