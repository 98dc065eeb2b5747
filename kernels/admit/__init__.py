"""Admission: choosing slots for the experts that a layer's step routes to, and the victims that make room.

One pool of S slots holds the experts of all layers. A layer's distinct experts D are cut into queries (`cut`), and
each query is admitted by itself (`admit`). Victims are free slots first, then the least recently used, or with a
half-life those of the lowest score (`kernels.admit.lrfu`), ties to the lowest slot; a slot whose expert the layer's
step still needs is never a victim.

If D fits (len(D) <= S), all queries may be admitted before the first one's copies have landed. If it does not, the
resident experts come first and each query is admitted when the GEMM over the one before it is done: slots of finished
queries may be reused, and each expert is still fetched at most once. Same input, same output.

`cut` and `admit` are the host's, who rings by itself. `admit_layer` does the whole layer on the device in one launch,
ring records and flags included, and waits for nobody: the same tables after it as after `cut` and `admit`.

`request_part` is for steps that need every expert of a layer: it changes no table of residents, and has what is not
resident copied into stream slots that lie behind the pool's S.
"""

from torch import Tensor

from kernels.admit import ref
from kernels.admit.device import (
    ERROR,
    FAILED,
    STATS,
    DeviceAdmission,
    check_layer,
    launches,
    most_queries,
    new_device_admission,
)
from kernels.admit.lrfu import half_life_of
from kernels.admit.state import ABSENT, FREE, AdmissionState, Cut, new_state
from kernels.admit.stream import STREAM_STATS, DeviceStream, check_part, new_device_stream

__all__ = [
    "ABSENT",
    "ERROR",
    "FAILED",
    "FREE",
    "STATS",
    "STREAM_STATS",
    "AdmissionState",
    "Cut",
    "DeviceAdmission",
    "DeviceStream",
    "admit",
    "admit_layer",
    "cut",
    "forget_all",
    "half_life_of",
    "invalidate",
    "launches",
    "most_queries",
    "new_device_admission",
    "new_device_stream",
    "new_state",
    "request_part",
]


def cut(state: AdmissionState, layer: int, experts: Tensor, max_query: int) -> Cut:
    """Cut the layer's distinct experts into queries of at most `max_query` (and at most S).

    `experts` [D] int64, distinct, ascending. ValueError for an empty pool or a `max_query` below 1.
    """
    if max_query < 1 or state.slots < 1:
        raise ValueError(f"queries of {max_query} experts in {state.slots} slots: both must be at least 1")
    return ref.cut(state, layer, experts, max_query)


def admit(
    state: AdmissionState, layer: int, query: Tensor, needed: Tensor, counts: bool = False
) -> tuple[Tensor, Tensor]:
    """Give every expert of `query` a slot; updates `state`.

    `query` [n] int64 is one of the queries of `cut`; `needed` [m] int64 are all experts of the layer whose GEMM in this
    step is not done yet, those of `query` included. A scored policy adds this use to the score of experts that are
    there if it `counts`, as a decode step's does. Returns slots [n] int32 and missing [n] bool: where it is true the
    expert was not resident, and its record must be copied into the slot. ValueError if too few slots may be evicted.
    """
    return ref.admit(state, layer, query, needed, counts)


def invalidate(state: AdmissionState, layer: int, experts: Tensor) -> None:
    """Forget these experts ([n] int64), whose records did not land: their slots are free. Absent ones are skipped."""
    ref.invalidate(state, layer, experts)


def forget_all(state: AdmissionState) -> None:
    """Forget all experts: every slot is free. Nothing may be on its way into one."""
    ref.forget_all(state)


def admit_layer(
    state: AdmissionState,
    device: DeviceAdmission,
    layer: int,
    offsets: Tensor,
    index: int = 0,
    count_routing: bool = False,
) -> None:
    """Admit the experts of a step's layer, those with offsets[e + 1] > offsets[e], on the device of the tables.

    `offsets` [E + 1] int32 is the layer's alignment. With `index` 0 the layer is cut and, if it fits, admitted whole;
    of an over-full one only query 0. The launches of `index` 1, 2, ... up to `launches` follow in the same stream, each
    after the GEMM over the query before, with the same offsets; where there is no such query they do nothing.
    Query i has flag i: landed at once if it has no misses, else cleared and rung. Flags of queries that the layer does
    not have are set too, so that a captured graph may wait for all. `device.spans` bounds the experts of each query.
    `count_routing`, of a decode step, adds the layer's distinct experts to `device.routing` (with `index` 0), and
    counts for a scored policy, as in `admit`.
    ValueError for what `check_layer` refuses.
    """
    check_layer(state, layer, offsets, index)
    from kernels.admit import tri

    tri.admit_layer(state, device, layer, offsets, index, count_routing)


def request_part(
    state: AdmissionState, admission: DeviceAdmission, stream: DeviceStream, layer: int, part: int, turn: int
) -> None:
    """Make part `part` of a layer's experts available in turn `turn`'s tables, on the device, in one launch.

    Experts that are not resident are rung, as one record of kind stream, to the turn's stream slots; the turn's flag is
    cleared before, or set at once if none is missing. Afterwards `stream.tables[turn]` has the slots of the part's
    experts and ABSENT for all others. Launch it behind the last GEMM that read the turn's tables. Once the ring has
    stayed full nothing is rung, and the flag says that the copies did not land. ValueError for a layer, part or turn
    that there is not.
    """
    check_part(state, stream, layer, part, turn)
    from kernels.admit import tri_stream

    tri_stream.request_part(state, admission, stream, layer, part, turn)
