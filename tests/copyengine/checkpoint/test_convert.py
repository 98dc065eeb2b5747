"""Conversions of element types in blocks: infinities against what the source has."""

from pathlib import Path

import numpy as np
import pytest

from copyengine.checkpoint import convert as module
from copyengine.checkpoint.convert import NUMPY_DTYPE, converted
from copyengine.wire.errors import ConfigError

NBYTES = 64


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
@pytest.mark.parametrize("sign", [1, -1])
def test_only_numbers_that_become_infinite_are_beyond_float16(
    source: str, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever block they are, also the last element of all; infinities and NaNs of the file are kept, 65,504 is
    float16's largest number, and float32 holds all."""
    monkeypatch.setattr(module, "BLOCK_NBYTES", NBYTES)
    for count in (0, 1, NBYTES // 4, NBYTES + 3):
        for at in {0, count // 2, count - 1} if count else ():
            values = np.ones(count, NUMPY_DTYPE[source])
            values[at] = 65024 * sign if source == "bfloat16" else 65504 * sign
            assert converted(values, "float16", Path("x"), "t").astype(np.float64)[at] == float(values[at])
            for kept in (np.inf, np.nan):
                values[at] = kept * sign
                made = converted(values, "float16", Path("x"), "t")
                assert np.array_equal(made, np.asarray(values, np.float16), equal_nan=True)
            values[at] = 66048 * sign
            assert float(converted(values, "float32", Path("x"), "t")[at]) == 66048 * sign
            with pytest.raises(ConfigError, match="x: tensor t holds values beyond float16's range"):
                converted(values, "float16", Path("x"), "t")
        assert converted(np.ones((count, 1), NUMPY_DTYPE[source]), "float16", Path("x"), "t").shape == (count, 1)
