"""Work cut into pieces for a few threads: numpy and file reads let go of the interpreter's lock."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def run_all(work: Sequence[Callable[[], T]], threads: int, name: str) -> list[T]:
    """What each piece of `work` returns, in its order. The first exception ends what has not begun, and is raised."""
    if not work:
        return []
    with ThreadPoolExecutor(min(threads, len(work)), name) as pool:
        futures = [pool.submit(piece) for piece in work]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            if future.exception() is not None:
                pool.shutdown(wait=True, cancel_futures=True)
                future.result()
        return [future.result() for future in futures]
