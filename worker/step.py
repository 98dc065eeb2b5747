"""One step: RunStep in, tokens out. Checks what was asked, runs the model, draws the tokens."""

from typing import NamedTuple, Protocol

import torch

from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import RequestRefused
from kernels.sampling import NotFinite, RowSampling, sample
from worker.kv import KvCache
from worker.model.batch import Batch, Span
from worker.model.stack import Decoder
from worker.protocol import ExpertStats, Mode, RunStep, Sampling, SequenceStep


class StepResult(NamedTuple):
    """`tokens[i]` is the token drawn for sequences[i], -1 where none was asked for."""

    tokens: list[int]
    stats: ExpertStats


class FullResult(NamedTuple):
    """What a step computed at every position."""

    result: StepResult
    hidden: torch.Tensor  # [T, H], normalised
    logits: torch.Tensor  # [T, V] float32


class StepExperts(Protocol):
    """The slot pool's side of a step."""

    def begin_step(self, mode: Mode) -> None: ...

    def end_step(self) -> ExpertStats: ...

    def abort_step(self) -> None: ...


class StepRunner:
    """Runs steps of one model, one at a time."""

    def __init__(self, spec: ModelSpec, model: Decoder, kv: KvCache, experts: StepExperts | None) -> None:
        """`experts` is None for a dense model."""
        self._spec = spec
        self._model = model
        self._kv = kv
        self._experts = experts
        self._device = kv.layers[0].k.device

    def run(self, step: RunStep) -> StepResult:
        """Runs the step. RequestRefused("invalid_request") if it asks for what is not there; nothing has run then.

        RequestRefused("bad_logits") if there is a token to draw from logits that are not finite. Whatever else fails
        while it runs is raised after the slots were told to drop what did not land. The KV of the step's new positions
        is undefined after either.
        """
        return self._run(step, every_row=False).result

    def run_full(self, step: RunStep) -> FullResult:
        """Like `run`, with the hidden states and logits of every position: for tests and for scoring."""
        return self._run(step, every_row=True)

    @torch.inference_mode()
    def _run(self, step: RunStep, every_row: bool) -> FullResult:
        check_step(step, self._spec, self._kv)
        batch = make_batch(step, self._kv.page_tokens, self._device)
        hidden, stats = self._hidden(step.mode, batch)
        return self._draw(step, batch, hidden, stats, every_row)

    def _hidden(self, mode: Mode, batch: Batch) -> tuple[torch.Tensor, ExpertStats]:
        """[T, H] of the batch's rows. The slots' step is around this and nothing else: no expert is needed to draw."""
        if self._experts is None:
            return self._model.hidden(batch), ExpertStats(steps=1)
        try:
            self._experts.begin_step(mode)
            hidden = self._model.hidden(batch)
            return hidden, self._experts.end_step()
        except BaseException:
            self._experts.abort_step()
            raise

    def _draw(
        self, step: RunStep, batch: Batch, hidden: torch.Tensor, stats: ExpertStats, every_row: bool
    ) -> FullResult:
        drawn = [i for i, sequence in enumerate(step.sequences) if sequence.sample is not None]
        last_rows = [batch.spans[i].first + batch.spans[i].rows - 1 for i in drawn]
        tokens = [-1] * len(step.sequences)
        rows = torch.arange(hidden.shape[0]) if every_row else torch.tensor(last_rows, dtype=torch.int64)
        logits = self._model.logits(hidden[rows.to(self._device)])
        if drawn:
            chosen = logits[last_rows] if every_row else logits
            for i, token in zip(drawn, _sampled(chosen, [step.sequences[i] for i in drawn]), strict=True):
                tokens[i] = token
        return FullResult(StepResult(tokens, stats), hidden, logits)


def _sampled(logits: torch.Tensor, sequences: list[SequenceStep]) -> list[int]:
    """The next token of each sequence from its row of `logits` [B, V]. RequestRefused("bad_logits")."""
    try:
        return sample(logits, _row_sampling(sequences, logits.device)).tolist()
    except NotFinite as error:
        raise RequestRefused(
            "bad_logits",
            f"the model's logits of sequence {sequences[error.row].sequence} are not finite: NaN or infinity in the "
            "weights, or an overflow of the element type; try --dtype float32",
        ) from None


def make_batch(step: RunStep, page_tokens: int, device: torch.device) -> Batch:
    """The step's rows, sequence after sequence."""
    tokens: list[int] = []
    positions: list[int] = []
    kv_pages: list[int] = []
    spans: list[Span] = []
    for sequence in step.sequences:
        here = range(sequence.start, sequence.start + len(sequence.tokens))
        pages = torch.tensor(sequence.pages, dtype=torch.int64, device=device)
        spans.append(Span(len(tokens), len(here), sequence.start, pages))
        tokens += sequence.tokens
        positions += here
        kv_pages += [sequence.pages[position // page_tokens] for position in here]
    rows = torch.tensor([tokens, positions, kv_pages], dtype=torch.int64, device=device)
    return Batch(rows[0], rows[1], rows[2], rows[1] % page_tokens, tuple(spans))


def check_step(step: RunStep, spec: ModelSpec, kv: KvCache) -> None:
    """RequestRefused("invalid_request") unless every token, position, page and setting of the step is possible."""
    for sequence in step.sequences:
        why = _fault(sequence, step.mode, spec, kv)
        if why:
            raise RequestRefused("invalid_request", f"sequence {sequence.sequence}: {why}")
    if len({sequence.sequence for sequence in step.sequences}) < len(step.sequences):
        raise RequestRefused("invalid_request", "a sequence appears twice in a step")
    written = [page for sequence in step.sequences for page in sequence.pages[sequence.start // kv.page_tokens :]]
    if len(set(written)) < len(written):
        raise RequestRefused("invalid_request", "two sequences would write to the same KV page")


def _fault(sequence: SequenceStep, mode: Mode, spec: ModelSpec, kv: KvCache) -> str | None:
    """What is wrong with one sequence's part of a step, or None."""
    length = sequence.start + len(sequence.tokens)
    needed = -(-length // kv.page_tokens)
    if not sequence.tokens or (mode == "decode" and len(sequence.tokens) != 1):
        return f"a {mode} step cannot have {len(sequence.tokens)} new tokens"
    if sequence.start < 0 or length > spec.max_position:
        return f"positions {sequence.start} .. {length - 1} are outside the model's 0 .. {spec.max_position - 1}"
    if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < spec.vocab_size:
        return f"token ids must be in 0 .. {spec.vocab_size - 1}"
    if len(sequence.pages) != needed:
        return f"{length} positions take {needed} pages of {kv.page_tokens}, not {len(sequence.pages)}"
    if not 0 <= min(sequence.pages) <= max(sequence.pages) < kv.num_pages:
        return f"KV pages must be in 0 .. {kv.num_pages - 1}"
    if len(set(sequence.pages)) < len(sequence.pages):
        return "a KV page appears twice"
    return _sampling_fault(sequence.sample)


def _sampling_fault(sampling: Sampling | None) -> str | None:
    if sampling is None:
        return None
    if not 0 <= sampling.temperature < float("inf"):
        return f"temperature must be finite and not negative, not {sampling.temperature}"
    if not 0 < sampling.top_p <= 1:
        return f"top_p must be in (0, 1], not {sampling.top_p}"
    if not 0 <= sampling.top_k < 2**63:
        return f"top_k must be in 0 .. 2**63 - 1, not {sampling.top_k}"
    return None


def _row_sampling(sequences: list[SequenceStep], device: torch.device) -> RowSampling:
    """The settings of the rows to draw; a row's token will be at the position after its last new one."""
    chosen = [(sequence.sample, sequence.start + len(sequence.tokens)) for sequence in sequences]
    settings = [(sampling, position) for sampling, position in chosen if sampling is not None]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return RowSampling(
        temperature=column([sampling.temperature for sampling, _ in settings], torch.float64),
        top_k=column([sampling.top_k for sampling, _ in settings], torch.int64),
        top_p=column([sampling.top_p for sampling, _ in settings], torch.float64),
        seed=column([_signed(sampling.seed) for sampling, _ in settings], torch.int64),
        position=column([position for _, position in settings], torch.int64),
    )


def _signed(seed: int) -> int:
    """The low 64 bits of `seed` as a signed word."""
    return (seed + 2**63) % 2**64 - 2**63
