"""--verify-copies: what a step is about to compute with is what was loaded, or the step fails. No torch.

Every expert that a step computes with is summed in its slot, after its copies have landed and before its GEMM, and
compared with the sum that the copy engine has made of its bank when that was loaded (copyengine.checksums). Hits too:
a slot may be written to later than its flag says, and looking costs as much as the GEMM's own reading of the record.
"""

from collections.abc import Sequence

import numpy as np

from copyengine.checksums import Sums, sums_of, weights_of
from copyengine.wire.errors import RequestRefused

MOST_DAMAGED_STEPS = 3
"""Steps with damaged experts after which the worker ends and the copy engine is started anew, whatever lay in between.
On a sound machine there are none. What one bit in a bank does fails only the requests that route there, others succeed
in between, and only loading mends it; a single error on the link is over with the step that it failed."""

DISTRUST = "damaged experts in {} steps: the copies, or the banks, are not to be trusted"


class CopyChecks:
    """What the records of each layer sum to, and how many steps found another sum. One thread, but for `steps`."""

    def __init__(self, sums: Sums, record_nbytes: int) -> None:
        """`sums` [L, E]: of the banks."""
        self.sums = sums
        self.weights = weights_of(record_nbytes)
        self.steps = 0  # that failed of it

    def damaged(
        self,
        layer: int,
        experts: Sequence[int],
        slots: Sequence[int],
        pool: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
    ) -> list[int]:
        """Those of `experts` whose record in slots[i] of `pool` [P, record_nbytes] is not that of the bank."""
        expected = self.sums[layer]
        pairs = zip(experts, slots, strict=True)
        return [e for e, slot in pairs if sums_of(pool[slot : slot + 1], self.weights)[0] != expected[e]]

    def failed(self, layer: int, expert: int, count: int) -> tuple[RequestRefused, str | None]:
        """A step found `count` damaged records, this one first: its error, and why no further step is to run, if so."""
        self.steps += 1
        others = f", and {count - 1} more" if count > 1 else ""
        why = DISTRUST.format(self.steps) if self.steps >= MOST_DAMAGED_STEPS else None
        error = RequestRefused("copy_damaged", f"expert {expert} of layer {layer} is damaged in its slot{others}")
        return error, why
