"""What lets monitors see the engine at work: /metrics."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from scheduler.http.front import Call, Front, Route
from scheduler.http.looking import look


async def metrics(front: Front, call: Call[None]) -> Response:
    """Prometheus' text format; of an engine that does not answer only what the front has seen."""
    return Response(front.metrics.text(await look(front.client)), 200, None, CONTENT_TYPE_LATEST)


ROUTES = [Route("GET", "/metrics", metrics, "Figures for Prometheus", serves=False)]
