"""What lets people and monitors see the engine at work: /metrics, the live page and what it asks for."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from scheduler.http.errors import ApiError
from scheduler.http.front import Call, Front, Route
from scheduler.http.live import MEDIA_TYPES, LiveFigures
from scheduler.http.looking import look


async def metrics(front: Front, call: Call[None]) -> Response:
    """Prometheus' text format; of an engine that does not answer only what the front has seen."""
    return Response(front.metrics.text(await look(front.client)), 200, None, CONTENT_TYPE_LATEST)


async def live(front: Front, call: Call[None]) -> Response:
    """LiveFigures as JSON."""
    return Response(await front.live.json(), 200, {"cache-control": "no-store"}, "application/json")


async def page(front: Front, call: Call[None]) -> Response:
    """The page; it asks for a key itself where one is needed for what it shows."""
    return front.live.page["live.html"].response()


async def page_file(front: Front, call: Call[None]) -> Response:
    """A file that the page consists of. ApiError 404 for another."""
    found = front.live.page.get(call.params["name"])
    if found is None:
        raise ApiError(404, "not_found_error", "the page has no such file", code="not_found")
    return found.response()


ROUTES = [
    Route("GET", "/metrics", metrics, "Figures for Prometheus", serves=False, media=("text/plain",)),
    Route("GET", "/live", live, "What the live page shows", reply=LiveFigures, serves=False),
    Route("GET", "/", page, "The live page", guarded=False, serves=False, media=("text/html",)),
    Route(
        "GET",
        "/page/{name}",
        page_file,
        "A file of the live page",
        guarded=False,
        serves=False,
        media=tuple(MEDIA_TYPES.values()),
    ),
]
