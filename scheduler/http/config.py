"""Settings of the HTTP front."""

from typing import Annotated

from msgspec import Meta, Struct

from copyengine.wire.logs import LogLevel
from copyengine.wire.loop import EventLoop

DEFAULT_HTTP_HOST = "127.0.0.1"
DEFAULT_HTTP_PORT = 8000
DEFAULT_BODY_NBYTES = 8 * 2**20
"""A million tokens as text or as numbers. What a body holds is decoded at one go, in which nothing else runs and a
thread would not help, since the decoder keeps the interpreter's lock: 8 MiB of empty lists, the worst found, hold
up all else for 0.6 s (AMD EPYC, 2026-11)."""

HttpHost = Annotated[str, Meta(description="address that HTTP is served on; anyone who reaches it is served")]
HttpPort = Annotated[int, Meta(ge=0, le=65535, description="port that HTTP is served on; 0 picks a free one")]
ApiKey = Annotated[
    str,
    Meta(description="HTTP requests must bring this key (Authorization: Bearer KEY); @FILE reads it from a file"),
]
MaxBodyBytes = Annotated[int, Meta(ge=1, le=2**31 - 1, description="bytes of an HTTP request's body at most")]
"""What launch.py and a front started alone have in common. Types, not a Struct: LaunchConfig has a base already, and
Structs have one."""


class HttpConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serves OpenAI-compatible HTTP, as a client of a running scheduler."""

    scheduler: Annotated[str, Meta(description="endpoint of the scheduler, such as tcp://127.0.0.1:5757")]
    model: Annotated[str, Meta(description="checkpoint directory that the scheduler serves: its tokenizer is read")]
    served_model_name: Annotated[str, Meta(description="name clients see; default the directory's name")] = ""
    hf_overrides: Annotated[
        str, Meta(description="JSON object merged over config.json, key by key also inside its objects")
    ] = "{}"
    http_host: HttpHost = DEFAULT_HTTP_HOST
    http_port: HttpPort = DEFAULT_HTTP_PORT
    api_key: ApiKey = ""
    http_max_body_bytes: MaxBodyBytes = DEFAULT_BODY_NBYTES
    event_loop: Annotated[EventLoop, Meta(description="asyncio event loop")] = "auto"
    log_level: Annotated[LogLevel, Meta(description="least severe log lines to show")] = "info"
    parent_pipe: Annotated[bool, Meta(description="stop when standard input ends (set by launch.py)")] = False
