"""What a graph is captured of, against the arrays of a step of that many sequences."""

import numpy as np
import pytest

from worker.decode_graphs import of_sequences
from worker.protocol import RunStep, Sampling, SequenceStep
from worker.step_inputs import step_arrays


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("few", [1, 3])
def test_arrays_of_more_sequences_are_those_of_the_first_one_often(few: int, recurrent: bool) -> None:
    settings = Sampling(temperature=0.5, top_k=3, seed=9)
    sequences = [SequenceStep(i, [5 + i], 20 + i, [1 + i, 7], settings, state=2 + i) for i in range(few)]
    found = of_sequences(step_arrays(RunStep("decode", sequences), 16, 4, recurrent), 6)
    expected = step_arrays(RunStep("decode", sequences[:1] * 6), 16, 4, recurrent)
    for name in found._fields:
        ours, theirs = getattr(found, name), getattr(expected, name)
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype, name
