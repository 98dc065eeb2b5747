"""Admission: choosing slots for the experts that a layer's step routes to, and the victims that make room.

One pool of S slots holds the experts of all layers. A layer's distinct experts D are cut into queries (`cut`), and
each query is admitted by itself (`admit`). Victims are free slots first, then the least recently used, ties to the
lowest slot; a slot whose expert the layer's step still needs is never a victim.

If D fits (len(D) <= S), all queries may be admitted before the first one's copies have landed. If it does not, the
resident experts come first and each query is admitted when the GEMM over the one before it is done: slots of finished
queries may be reused, and each expert is still fetched at most once. Same input, same output.
"""

from torch import Tensor

from kernels.admit import ref
from kernels.admit.state import ABSENT, AdmissionState, Cut, new_state

__all__ = ["ABSENT", "AdmissionState", "Cut", "admit", "cut", "invalidate", "new_state"]


def cut(state: AdmissionState, layer: int, experts: Tensor, max_query: int) -> Cut:
    """Cut the layer's distinct experts into queries of at most `max_query` (and at most S).

    `experts` [D] int64, distinct, ascending. ValueError for an empty pool or a `max_query` below 1.
    """
    if max_query < 1 or state.slots < 1:
        raise ValueError(f"queries of {max_query} experts in {state.slots} slots: both must be at least 1")
    return ref.cut(state, layer, experts, max_query)


def admit(state: AdmissionState, layer: int, query: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
    """Give every expert of `query` a slot; updates `state`.

    `query` [n] int64 is one of the queries of `cut`; `needed` [m] int64 are all experts of the layer whose GEMM in this
    step is not done yet, those of `query` included. Returns slots [n] int32 and missing [n] bool: where it is true the
    expert was not resident, and its record must be copied into the slot. ValueError if too few slots may be evicted.
    """
    return ref.admit(state, layer, query, needed)


def invalidate(state: AdmissionState, layer: int, experts: Tensor) -> None:
    """Forget these experts ([n] int64), whose records did not land: their slots are free. Absent ones are skipped."""
    ref.invalidate(state, layer, experts)
