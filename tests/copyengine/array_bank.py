"""A bank that is an array of the test's."""

import numpy as np

from copyengine.device import Bytes


class ArrayBank:
    """See copyengine.device.Bank. Closing it leaves the array alone."""

    def __init__(self, array: Bytes) -> None:
        self.array = array
        self.pageable_nbytes = 0  # as if so many bytes at its end were not pinned

    @property
    def pinned_nbytes(self) -> int:
        return self.nbytes - self.pageable_nbytes

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def close(self) -> None:
        self.array = np.empty(0, np.uint8)
