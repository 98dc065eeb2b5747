"""Every error the engine raises on purpose; each class says who dies.

```text
SlotstreamError
├── ConfigError       a start is refused: the process exits with code 2; names the key and the value
├── RequestRefused    one request ends with `code` and `detail`; everything else goes on
├── PeerError         a process we depend on failed
│   ├── PeerDied      it is gone (connection closed, exit seen)
│   └── PeerTimeout   it did not answer within the deadline
├── CopyFailed        an expert's copy did not land: the step's requests end, their slots are invalidated
└── WireError         one frame is dropped and counted; the process goes on
```
"""


class SlotstreamError(Exception):
    """Base of all errors below; never raised itself."""


class ConfigError(SlotstreamError):
    """A setting, a checkpoint or the machine does not allow a start; names the key, the value and the fix."""


class RequestRefused(SlotstreamError):
    """One request cannot be served, or ended early. `code` is machine-readable, `detail` is for a person."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class PeerError(SlotstreamError):
    """A process that this one depends on failed; raised itself if our own side of the connection to it did."""


class PeerDied(PeerError):
    """The peer's connection closed or its process ended while we waited for it."""


class PeerTimeout(PeerError):
    """The peer did not answer within the deadline."""


class CopyFailed(SlotstreamError):
    """The copy engine reported that an expert's copy failed, or was released because the copy engine died."""


class WireError(SlotstreamError):
    """A frame was malformed, oversized or of an unexpected type, or a message has no form as one."""


_BY_CODE: dict[str, type[SlotstreamError]] = {
    "config": ConfigError,
    "peer_died": PeerDied,
    "peer_timeout": PeerTimeout,
    "copy_failed": CopyFailed,
    "wire": WireError,
}


def unforeseen(error: BaseException) -> str:
    """What others are told of an error that nobody foresaw: its type. Its words stay where it was raised, since they
    may quote a request, and what a process is told ends up in its log and with the clients of other requests."""
    return f"{type(error).__name__}; the log says where"


def code_of(error: SlotstreamError) -> str:
    """The `code` under which `error` travels in a Failed reply."""
    if isinstance(error, RequestRefused):
        return error.code
    return next((code for code, kind in _BY_CODE.items() if isinstance(error, kind)), "internal")


def from_code(code: str, detail: str) -> SlotstreamError:
    """The error that a Failed reply stands for; RequestRefused for a code that names no other class."""
    kind = _BY_CODE.get(code)
    return kind(detail) if kind else RequestRefused(code, detail)
