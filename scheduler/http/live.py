"""/: the page that shows the engine at work, and /live, which it asks once a second while somebody looks at it.

It asks and is not told: nothing is done when nobody looks, and a front that is started anew is simply asked again.
"""

import asyncio
import time
from collections.abc import Callable
from importlib.resources import files

import msgspec
from msgspec import Struct
from starlette.responses import Response

from scheduler.client import Client
from scheduler.http.errors import without_paths
from scheduler.http.looking import Look, look
from scheduler.http.metrics import Metrics, Spread
from scheduler.protocol import ActivityReply, StatsReply

SHARED_S = 0.5
"""Seconds for which an answer serves everybody who asks: many pages cost the engine what two cost."""

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""The page runs what this front serves, and nothing else."""


class LiveFigures(Struct, frozen=True):
    """What /live answers. `at_s` is this machine's clock, for rates; see HealthReply of what is being loaded.

    `phase` is the engine's, or "away" if it does not answer. Of `stats` and `activity` those are null that it did not
    give in time.
    """

    at_s: float
    model: str
    phase: str
    ttft: Spread
    detail: str = ""
    loading: str = ""
    done_nbytes: int = 0
    total_nbytes: int = 0
    stats: StatsReply | None = None
    activity: ActivityReply | None = None


class Live:
    """Looks at the engine for all who look at the page."""

    def __init__(
        self, client: Client, metrics: Metrics, model: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`model` is the name that clients see."""
        self._client = client
        self._metrics = metrics
        self._model = model
        self.page = page_files()
        self._clock = clock
        self._looking = asyncio.Lock()
        self._seen: tuple[float, bytes] | None = None

    async def json(self) -> bytes:
        """LiveFigures, no older than SHARED_S."""
        async with self._looking:
            if self._seen is None or self._clock() - self._seen[0] > SHARED_S:
                seen = await look(self._client, with_activity=True)
                now_s = self._clock()
                self._seen = now_s, msgspec.json.encode(self._reply(seen, now_s))
            return self._seen[1]

    def _reply(self, seen: Look, now_s: float) -> LiveFigures:
        health, ttft = seen.health, self._metrics.first_tokens()
        if health is None:
            return LiveFigures(now_s, self._model, "away", ttft)
        return LiveFigures(
            at_s=now_s,
            model=self._model,
            phase=health.phase,
            ttft=ttft,
            detail=without_paths(health.detail),
            loading=health.loading,
            done_nbytes=health.done_nbytes,
            total_nbytes=health.total_nbytes,
            stats=seen.stats,
            activity=seen.activity,
        )


class PageFile(Struct, frozen=True):
    """A file of the page, which holds nothing that needs a key."""

    body: bytes
    media_type: str

    def response(self) -> Response:
        """As it is answered."""
        return Response(self.body, 200, HEADERS, self.media_type)


def page_files() -> dict[str, PageFile]:
    """Each file of the page by its name."""
    found = {}
    for path in (files("scheduler.http") / "page").iterdir():
        kind = MEDIA_TYPES.get("." + path.name.rpartition(".")[2])
        if kind is not None:
            found[path.name] = PageFile(path.read_bytes(), kind)
    return found
