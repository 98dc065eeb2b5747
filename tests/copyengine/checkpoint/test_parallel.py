"""run_all against the same work done in a row."""

import threading
from functools import partial

import pytest

from copyengine.checkpoint.parallel import run_all


@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("threads", [1, 2, 16])
def test_results_come_in_the_order_of_the_work(pieces: int, threads: int) -> None:
    assert run_all([partial(pow, i, 2) for i in range(pieces)], threads, "test") == [i**2 for i in range(pieces)]


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_a_failure_is_raised_and_nothing_more_is_begun(threads: int) -> None:
    begun: list[int] = []
    lock = threading.Lock()

    def piece(number: int) -> int:
        with lock:
            begun.append(number)
        if number >= 5:
            raise KeyError(number)
        return number

    with pytest.raises(KeyError):
        run_all([partial(piece, i) for i in range(1000)], threads, "test")
    assert len(begun) < 6 + threads
