"""Messages to and from the copy engine. Imports the standard library and msgspec only."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Dtype = Literal["bfloat16", "float16", "float32"]
"""Element type of the weights in memory and of the activations."""

LoadFormat = Literal["auto", "dummy"]
"""Where weights come from: the checkpoint's files, or made up from its config.json alone."""

ExpertActivations = Literal["plain", "w4a4"]
"""What is done to activations before they meet experts quantised to FP4: nothing, or they are rounded to FP4 too."""

MAX_QUERY = 128
"""Experts in one query at most (DESIGN: the unit of admission, copying and completion)."""


class MemoryHandle(Struct, frozen=True, tag=True):
    """Memory that another process, or another part of this one, may map.

    By `kind`, `name` is: `shm`, a shared memory segment; `cuda_ipc`, the hexadecimal digits of a CUDA IPC memory
    handle; `cuda_local`, those of a device address, valid in the process that sent it alone.
    """

    kind: Literal["shm", "cuda_ipc", "cuda_local"]
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,160}$")]
    nbytes: Annotated[int, Meta(ge=1)]
    device: Annotated[str, Meta(pattern=r"^[A-Za-z0-9:._-]{0,64}$")] = ""  # PCI bus id of a CUDA device; "" for shm


# Requests -----------------------------------------------------------------------------------------------------------


class Load(Struct, frozen=True, tag=True):
    """Load the expert banks of the checkpoint in directory `model`, as `dtype`.

    Idempotent: while one load runs, a second Load of the same model and dtype joins it; of another one is refused.
    """

    model: str
    dtype: Dtype
    hf_overrides: str = "{}"  # JSON object merged over config.json
    load_format: LoadFormat = "auto"
    expert_activations: ExpertActivations = "plain"
    checksums: bool = False  # of the records, for workers that verify what is copied


class Attach(Struct, frozen=True, tag=True):
    """Serve the ring of worker `worker`: copies go from the banks into its pool, completion into its flags."""

    worker: str
    pool: MemoryHandle  # [pool_slots, record_nbytes] uint8
    flags: MemoryHandle  # [flag_count] uint32
    ring: MemoryHandle
    pool_slots: Annotated[int, Meta(ge=1)]


class Wake(Struct, frozen=True, tag=True):
    """A step of worker `worker` is about to ring: poll its ring."""

    worker: str


class Stats(Struct, frozen=True, tag=True):
    """Ask for the counters."""


class Detach(Struct, frozen=True, tag=True):
    """Forget worker `worker`; unmaps its memory."""

    worker: str


class Shutdown(Struct, frozen=True, tag=True):
    """End the process after this reply."""


Request = Load | Attach | Wake | Stats | Detach | Shutdown

# Replies ------------------------------------------------------------------------------------------------------------


class LoadProgress(Struct, frozen=True, tag=True):
    """Not final: bytes of expert weights read so far."""

    phase: str
    done_nbytes: int
    total_nbytes: int


class Loaded(Struct, frozen=True, tag=True):
    """The banks are filled. `record_nbytes` is 0 for a dense model."""

    record_nbytes: int
    moe_layers: int  # L
    experts: int  # E
    bank_nbytes: int  # all banks together, exactly as allocated
    read_nbytes: int  # bytes read from the checkpoint's files for it, headers not counted
    load_s: float
    pinned_nbytes: int = 0  # of the banks: what GPUs copy by themselves; the rest goes by way of the processor
    input_scales: list[tuple[float, float]] = []  # of each bank, gate_up's and down's, if experts quantise their inputs
    checksums: bytes = b""  # [L, E] int64 of the records if the Load asked for them: see copyengine.checksums


class Attached(Struct, frozen=True, tag=True):
    """The worker's ring is being served."""


class Done(Struct, frozen=True, tag=True):
    """Wake, Detach and Shutdown went through."""


class CopyCounters(Struct, frozen=True):
    """Counters since the start, for one kind of query: records and bytes that were started and did not fail."""

    queries: int = 0
    records: int = 0
    nbytes: int = 0
    failed_queries: int = 0


class StatsReply(Struct, frozen=True, tag=True):
    """Counters of the whole copy engine."""

    demand: CopyCounters
    stream: CopyCounters
    prefetch: CopyCounters
    bank_nbytes: int
    workers: list[str]
    dropped_frames: int
    asleep: bool  # no ring is being polled at this moment
    malformed_records: int = 0  # ring records that made no sense; their flags, if readable, were set to failed
    pinned_nbytes: int = 0  # of the banks: what GPUs copy by themselves
    pageable_nbytes: int = 0  # and what the processor copies, through staging buffers or, on the host, straight away


class Failed(Struct, frozen=True, tag=True):
    """The request was not carried out. `code` is one of the error names in wire.errors, or a reason in snake_case."""

    code: str
    detail: str


Reply = LoadProgress | Loaded | Attached | Done | StatsReply | Failed
FINAL = (Loaded, Attached, Done, StatsReply, Failed)
