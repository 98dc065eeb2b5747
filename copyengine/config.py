"""Settings of the copy engine process."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from copyengine.wire.logs import LogLevel
from copyengine.wire.loop import EventLoop


class CopyEngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the expert weights of a model once for all workers of this host and copies them into their slots."""

    endpoint: Annotated[str, Meta(description="loopback ZMQ endpoint to serve; port 0 picks a free one")] = (
        "tcp://127.0.0.1:0"
    )
    device: Annotated[
        Literal["cpu", "cuda"], Meta(description="cuda: pinned banks, copied to GPUs; cpu: all in shared memory")
    ] = "cpu"
    ordinal: Annotated[int, Meta(ge=0, description="GPU in whose context banks are pinned, for all GPUs to use")] = 0
    run_id: Annotated[str, Meta(description="prefix of this run's shared memory names; made up if empty")] = ""
    background_depth: Annotated[int, Meta(ge=1, le=64, description="background pieces in flight at most")] = 2
    spin_us: Annotated[int, Meta(ge=0, description="how long to poll an empty ring before sleeping")] = 2000
    event_loop: Annotated[EventLoop, Meta(description="asyncio event loop")] = "auto"
    log_level: Annotated[LogLevel, Meta(description="least severe log lines to show")] = "info"
    parent_pipe: Annotated[bool, Meta(description="stop when standard input ends (set by launch.py)")] = False
