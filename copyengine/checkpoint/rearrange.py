"""Brings a matrix of an expert, as some files have it, into the order of a record's field."""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class Order(Struct, frozen=True):
    """What the files have otherwise than the field [N, ...], whose first half of rows is gate's and second half up's.

    `interleaved`: the rows alternate, gate's first. `transposed`: the matrix is [K, N]. `run`: the last dimension is
    cut into runs of that many elements.
    """

    transposed: bool = False
    interleaved: bool = False
    run: int = 0

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the files of a field of `shape`."""
        if self.transposed:
            return shape[::-1]
        return (*shape[:-1], shape[-1] // self.run, self.run) if self.run else shape

    def fill(self, target: NDArray[np.uint8], stored: NDArray[np.generic], rows: int) -> None:
        """Write the elements `stored`, in the order of the files, into the bytes `target` of a field of N = `rows`."""
        field = target.view(stored.dtype).reshape(rows, -1)
        matrix = stored.reshape(-1, rows).T if self.transposed else stored.reshape(rows, -1)
        if self.interleaved:
            field[: rows // 2], field[rows // 2 :] = matrix[0::2], matrix[1::2]
        else:
            field[:] = matrix


AS_IT_IS = Order()
