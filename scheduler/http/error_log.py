"""The log line of each HTTP request that was not answered as it asked. Those that were have the scheduler's alone."""

from copyengine.wire.errors import PeerError, SlotstreamError, code_of
from copyengine.wire.logs import Log
from scheduler.http.errors import ApiError
from scheduler.request_log import OWN_WORDS

log = Log(__name__)


def log_http_error(request_id: str, status: int, error: ApiError | SlotstreamError) -> None:
    """`status` is what the client got: 200 if its stream had begun. The request's own words are left out, as
    request_log.py says; of an engine that is gone or silent the log alone has them, the client learns only the kind.
    """
    code = error.body.error.code or error.body.error.type if isinstance(error, ApiError) else code_of(error)
    own = isinstance(error, PeerError) or (isinstance(error, SlotstreamError) and code in OWN_WORDS)
    log.info("http_error", id=request_id, status=status, code=code, **({"detail": str(error)} if own else {}))
