"""Settings of a worker process."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from copyengine.wire.logs import LogLevel
from copyengine.wire.loop import EventLoop


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Runs the model on one device. The model and its sizes come with the scheduler's Load."""

    endpoint: Annotated[str, Meta(description="loopback ZMQ endpoint to serve; port 0 picks a free one")] = (
        "tcp://127.0.0.1:0"
    )
    name: Annotated[str, Meta(description="name of this worker, unique in the run")] = "worker0"
    run_id: Annotated[str, Meta(description="prefix of this run's shared memory names; made up if empty")] = ""
    copy_engine: Annotated[
        str, Meta(description="endpoint of the copy engine; empty runs it as a thread of this process")
    ] = ""
    device: Annotated[Literal["cpu", "cuda"], Meta(description="where the model runs")] = "cpu"
    ordinal: Annotated[int, Meta(ge=0, description="GPU that the model runs on, with --device cuda")] = 0
    threads: Annotated[
        int, Meta(ge=0, description="compute threads; 0 takes all cores but one, which is left to copies")
    ] = 0
    deterministic: Annotated[
        bool, Meta(description="a position's logits are the same bits whatever shares its step and however it is cut")
    ] = False
    event_loop: Annotated[EventLoop, Meta(description="asyncio event loop")] = "auto"
    log_level: Annotated[LogLevel, Meta(description="least severe log lines to show")] = "info"
    parent_pipe: Annotated[bool, Meta(description="stop when standard input ends (set by launch.py)")] = False
