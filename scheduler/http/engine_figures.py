"""What the engine says of itself as Prometheus' metrics. Its counters begin anew with the scheduler, which Prometheus
takes for what it is. A name that vLLM has is meant as there."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from scheduler.http.looking import Look
from scheduler.protocol import ModeCounters, StatsReply, WorkerCounters

PREFIX = "slotstream:"
MODEL = "model_name"

Figure = tuple[str, str, Callable[[StatsReply], float]]
WorkerFigure = tuple[str, str, Callable[[WorkerCounters], float]]
PhaseFigure = tuple[str, str, Callable[[ModeCounters], float]]

COUNTERS: tuple[Figure, ...] = (
    ("prompt_tokens", "Prompt tokens of accepted requests.", lambda stats: stats.prompt_tokens),
    ("generation_tokens", "Tokens sent to clients, of HTTP or not.", lambda stats: stats.generated_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda stats: stats.queried_tokens),
    ("prefix_cache_hits", "Prompt tokens that did not have to be computed.", lambda stats: stats.cached_tokens),
    ("num_preemptions", "Times that a request gave its KV pages back.", lambda stats: stats.preempted),
    ("requests_finished", "Requests that ended as they should, over HTTP or not.", lambda stats: stats.finished),
    ("requests_failed", "Accepted requests that ended with an error.", lambda stats: stats.failed),
    (
        "requests_not_finite",
        "Of those that failed, the ones for which the model computed NaN or infinity.",
        lambda stats: stats.not_finite,
    ),
    ("requests_aborted", "Accepted requests whose client ended them or left.", lambda stats: stats.aborted),
    ("requests_refused", "Requests that were not accepted.", lambda stats: stats.refused),
    ("dropped_frames", "Malformed frames that the scheduler dropped.", lambda stats: stats.dropped_frames),
)
GAUGES: tuple[Figure, ...] = (
    ("bank_bytes", "Host memory that holds the experts.", lambda stats: stats.bank_nbytes),
    ("pinned_bytes", "Part of bank_bytes that is pinned.", lambda stats: stats.pinned_nbytes),
)
WORKER_GAUGES: tuple[WorkerFigure, ...] = (
    ("worker_up", "1 while the worker takes requests.", lambda worker: worker.alive),
    ("num_requests_running", "Answers that prefill or decode.", lambda worker: worker.running),
    ("num_requests_waiting", "Answers that wait for their turn.", lambda worker: worker.waiting),
    (
        "kv_cache_usage_perc",
        "Share of the KV pages that running requests hold, 1 being all; cached ones that nobody uses are free.",
        lambda worker: _share(worker.kv_pages_total - worker.kv_pages_available, worker.kv_pages_total),
    ),
    ("slots", "Experts that the slot pool holds.", lambda worker: worker.slots),
    ("slots_resident", "Slots that held an expert after the last step.", lambda worker: worker.resident_slots),
    ("stream_slots", "Slots that streamed experts pass through.", lambda worker: worker.stream_slots),
)
PHASES = ("decode", "demand", "streamed")
PHASE_COUNTERS: tuple[PhaseFigure, ...] = (
    ("expert_hits", "Experts that a step found in a slot.", lambda mode: mode.hits),
    ("expert_misses", "Experts that a step had to have copied.", lambda mode: mode.misses),
    ("copied_bytes", "Bytes of experts copied to the device.", lambda mode: mode.copied_nbytes),
    (
        "copy_wait_seconds",
        "Seconds in which copies for such steps were under way: the most that computing can have waited for them.",
        lambda mode: mode.copy_wait_s,
    ),
    ("step_seconds", "Seconds that such steps took, from going out to the worker to being back.", lambda m: m.step_s),
)


def engine_figures(look: Look, model: str) -> Iterator[Metric]:
    """All of them; of an engine that does not answer only that."""
    ready = look.health is not None and look.health.ready
    yield _gauge("engine_up", "1 if the scheduler answered this scrape.", [MODEL], [([model], look.stats is not None)])
    yield _gauge("engine_ready", "1 if a request would be accepted.", [MODEL], [([model], ready)])
    if look.stats is not None:
        yield from _whole(look.stats, model)
        yield from _by_worker(look.stats.workers, model)


def _whole(stats: StatsReply, model: str) -> Iterator[Metric]:
    for name, text, figure in COUNTERS:
        yield _counter(name, text, [MODEL], [([model], figure(stats))])
    for name, text, figure in GAUGES:
        yield _gauge(name, text, [MODEL], [([model], figure(stats))])


def _by_worker(workers: Sequence[WorkerCounters], model: str) -> Iterator[Metric]:
    for name, text, figure in WORKER_GAUGES:
        yield _gauge(name, text, [MODEL, "worker"], [([model, worker.name], figure(worker)) for worker in workers])
    for name, text, of_mode in PHASE_COUNTERS:
        samples = [
            ([model, worker.name, phase], of_mode(getattr(worker, phase))) for worker in workers for phase in PHASES
        ]
        yield _counter(name, text, [MODEL, "worker", "phase"], samples)
    chunks = [([model, worker.name, mode], getattr(worker, mode).steps) for worker in workers for mode in PHASES[1:]]
    yield _counter("chunks", "Prefill steps.", [MODEL, "worker", "mode"], chunks)
    lost = [([model, worker.name], worker.restarts) for worker in workers]
    yield _counter("restarts", "Times that the worker was lost.", [MODEL, "worker"], lost)
    failed = [
        ([model, worker.name, code], count) for worker in workers for code, count in sorted(worker.failed_steps.items())
    ]
    yield _counter("failed_steps", "Steps that ended the requests they carried.", [MODEL, "worker", "code"], failed)
    steps = [([model, worker.name], worker.decode.steps) for worker in workers]
    yield _counter("decode_steps", "Decode steps.", [MODEL, "worker"], steps)


Samples = Sequence[tuple[list[str], float]]


def _counter(name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _gauge(name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
