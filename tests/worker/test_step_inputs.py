"""What a step computes on, against places written out by hand and against what was packed."""

import numpy as np
import torch

from worker.protocol import RunStep, Sampling, SequenceStep
from worker.step_inputs import assemble, on_device, pack, packed_nbytes, step_arrays, views

WARM = Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=2**63 + 1)
PREFILL = RunStep("demand", [SequenceStep(0, [7, 8, 9], 3, [5, 6], WARM), SequenceStep(1, [1], 0, [2], None)])
DECODE = RunStep("decode", [SequenceStep(0, [7], 9, [5, 6, 3], WARM), SequenceStep(1, [1], 0, [2], WARM)])


def test_rows_come_one_sequence_after_the_other() -> None:
    inputs = on_device(PREFILL, step_arrays(PREFILL, 4), torch.device("cpu"))
    batch = inputs.batch
    assert batch.tokens.tolist() == [7, 8, 9, 1]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert batch.kv_pages.tolist() == [5, 6, 6, 2]
    assert batch.kv_offsets.tolist() == [3, 0, 1, 0]
    assert [(span.first, span.rows, span.start) for span in batch.spans] == [(0, 3, 3), (3, 1, 0)]
    assert [span.pages.tolist() for span in batch.spans] == [[5, 6], [2]]
    assert batch.table is None


def test_only_sequences_that_draw_have_settings() -> None:
    inputs = on_device(PREFILL, step_arrays(PREFILL, 4), torch.device("cpu"))
    assert inputs.rows.tolist() == [2]
    assert [values.tolist() for values in inputs.sampling] == [[0.5], [3], [0.9], [0.1], [1 - 2**63], [6]]


def test_a_decode_step_by_page_table() -> None:
    """The table's pages are in order, its lengths count the new position."""
    inputs = on_device(DECODE, step_arrays(DECODE, 4, table_pages=5), torch.device("cpu"))
    assert inputs.batch.table is not None and inputs.batch.spans == ()
    assert inputs.batch.table.pages.tolist() == [[5, 6, 3, 0, 0], [2, 0, 0, 0, 0]]
    assert inputs.batch.table.lengths.tolist() == [10, 1]
    assert inputs.rows.tolist() == [0, 1]


def test_packed_arrays_are_found_again() -> None:
    """Against the arrays that were packed, odd sizes and empty ones among them."""
    for step, pages in ((PREFILL, 0), (DECODE, 3)):
        arrays = step_arrays(step, 4, table_pages=pages)
        packed = torch.full((packed_nbytes(arrays),), 0xFF, dtype=torch.uint8)
        pack(arrays, packed)
        tensors = views(packed, arrays)
        for tensor, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
        assert assemble(tensors, ()).rows.tolist() == arrays.rows.tolist()
