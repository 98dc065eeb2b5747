"""/metrics: what the front has seen of its own requests, and what the engine says of itself when it is asked.

The names are vLLM's under our prefix for what vLLM has. A registry of its own: two fronts in one process share nothing.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.exposition import generate_latest

from scheduler.http.engine_figures import MODEL, PREFIX, engine_figures
from scheduler.http.looking import Look
from scheduler.protocol import Choice

LONG_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Bounds for what may take minutes: a long prompt over a slow link, a long answer."""

SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
"""Bounds for the gap between two tokens, in which another request's chunk may fall."""

SEEN = " As seen by this HTTP front since its start, of answers over HTTP alone."
SUCCESSES = ("stop", "length", "abort")


class Spread(Struct, frozen=True):
    """A histogram: counts[i] lie above bounds[i - 1] and not above bounds[i], the last of counts above all bounds."""

    bounds: list[float]
    counts: list[int]


class Metrics:
    """The figures of one front."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`model` is the name that clients see."""
        self.clock = clock
        self._model = model
        self._registry = CollectorRegistry(auto_describe=False)
        self.ttft = self._histogram("time_to_first_token_seconds", "Time from request to first token.", LONG_S)
        self.gap = self._histogram("inter_token_latency_seconds", "Time between two tokens of an answer.", SHORT_S)
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "Time from request to its end, if it ended by itself.", LONG_S
        )
        self.queued = self._histogram(
            "request_queue_time_seconds", "Time in the engine's queue, of answers that ended by themselves.", LONG_S
        )
        ended = Counter(
            PREFIX + "request_success",
            "Answers without an error, by how they ended." + SEEN,
            [MODEL, "finished_reason"],
            registry=self._registry,
        )
        refused = Counter(
            PREFIX + "http_requests_refused",
            "Requests that this HTTP front refused since its start because others that came over HTTP had taken the "
            "engine's places; those that the engine refused are in requests_refused.",
            [MODEL],
            registry=self._registry,
        )
        self.refused = refused.labels(model)
        self.ended = {reason: ended.labels(model, reason) for reason in SUCCESSES}

    def observe(self) -> "Observation":
        """Sees one answer. An Observer, see answering.py."""
        return Observation(self)

    def text(self, look: Look) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(_Page(self._registry, look, self._model))

    def first_tokens(self) -> Spread:
        """The times to the first token in seconds."""
        (family,) = self.ttft.collect()
        below = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        counts = [int(value - before) for before, value in zip([0.0, *below], below, strict=False)]
        return Spread(list(LONG_S), counts)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, text + SEEN, [MODEL], registry=self._registry, buckets=bounds)
        return family.labels(self._model)


class Observation:
    """The times of one answer, from its beginning to its end."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began_s = 0.0
        self._last_s: float | None = None  # of the last token

    def began(self, prompt_tokens: int) -> None:
        """It goes to the engine now."""
        self._began_s = self._metrics.clock()

    def token(self, count: int) -> None:
        """`count` new tokens came. Text that was held back comes without any."""
        if not count:
            return
        now_s = self._metrics.clock()
        if self._last_s is None:
            self._metrics.ttft.observe(now_s - self._began_s)
            count -= 1
        since_s = now_s if self._last_s is None else self._last_s
        for _ in range(count):
            self._metrics.gap.observe((now_s - since_s) / count)
        self._last_s = now_s

    def ended(self, reason: str, end: Choice | None) -> None:
        """Errors are the engine's to count: it refuses or fails requests of all clients."""
        if reason in self._metrics.ended:
            self._metrics.ended[reason].inc()
        if end is not None:
            self._metrics.whole.observe(self._metrics.clock() - self._began_s)
            self._metrics.queued.observe(end.timing.queued_s)


class _Page:
    """One scrape: the front's figures and then the engine's."""

    def __init__(self, registry: CollectorRegistry, look: Look, model: str) -> None:
        self._registry = registry
        self._look = look
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client.registry.Collector."""
        yield from _without_times_of_making(self._registry.collect())
        yield from engine_figures(self._look, self._model)


def _without_times_of_making(families: Iterable[Metric]) -> Iterator[Metric]:
    """When a figure was made, which prometheus_client adds as a metric of its own, says what its fall to 0 says too."""
    for family in families:
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        yield family
