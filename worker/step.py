"""One step: RunStep in, tokens out. Checks what was asked, runs the model, draws the tokens."""

import traceback
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import RequestRefused
from kernels.sampling import sample
from worker.drawing import Drawn, Extras, extras_of, extras_on_device, read_logprobs, with_extras
from worker.kv import KvCache
from worker.model.batch import Batch
from worker.model.stack import Decoder
from worker.protocol import NOT_FINITE, ExpertStats, Logprobs, Mode, RunStep, StepDone
from worker.state import StateSlots
from worker.step_check import check_step
from worker.step_inputs import StepArrays, StepInputs, on_device, step_arrays


class FullResult(NamedTuple):
    """What a step computed at every position."""

    result: StepDone
    hidden: torch.Tensor  # [T, H], normalised
    logits: torch.Tensor  # [T, V] float32


class StepExperts(Protocol):
    """The slot pool's side of a step."""

    def begin_step(self, mode: Mode) -> None: ...

    def collect(self, words: torch.Tensor) -> list[int]:
        """What the step drew, `words` [W] int64, on the host, once all that was computed is done."""
        ...

    def end_step(self) -> ExpertStats: ...

    def abort_step(self) -> None: ...


class DecodeGraphs(Protocol):
    """Decode steps as graphs."""

    def __call__(self, arrays: StepArrays) -> Drawn | None:
        """What a decode step draws, computed by a graph; None if there is none yet for its size."""
        ...


class StepRunner:
    """Runs steps of one model, one at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        model: Decoder,
        kv: KvCache,
        experts: StepExperts,
        table_pages: int = 0,
        graphs: DecodeGraphs | None = None,
        states: StateSlots | None = None,
    ) -> None:
        """Decode steps come by page tables of `table_pages` pages, if not 0; `states` are those that `model` has."""
        self._spec = spec
        self._model = model
        self._kv = kv
        self._experts = experts
        self._table_pages = table_pages
        self._graphs = graphs
        self._states = states
        self._device = kv.device

    def run(self, step: RunStep) -> StepDone:
        """Runs the step. RequestRefused("invalid_request") if it asks for what is not there; nothing has run then.

        Whatever fails while it runs is raised after the slots were told to drop what did not land;
        RequestRefused("device_out_of_memory") if the device had too little left. The KV of the step's new positions and
        the states that it writes are undefined then, as are those of a sequence that is NOT_FINITE, or has no token
        because its logits are not.
        """
        arrays, extras = self._checked(step)
        with torch.inference_mode():
            words, stats = self._in_step(step, lambda: self._words(extras, lambda: self._drawn(step, arrays)))
        return _done(step, words, stats, extras)

    def run_full(self, step: RunStep) -> FullResult:
        """Like `run`, with the hidden states and logits of every position: for tests and for scoring."""
        arrays, extras = self._checked(step)
        full: list[torch.Tensor] = []

        def drawn() -> Drawn:
            inputs = on_device(step, arrays, self._device)
            full.append(self._model.hidden(inputs.batch))
            full.append(self._model.logits(full[0]))
            logits = full[1][inputs.rows]
            return Drawn(sample(logits, inputs.sampling), logits, are_finite(full[0], inputs.batch, inputs.rows))

        with torch.inference_mode():
            words, stats = self._in_step(step, lambda: self._words(extras, drawn))
        return FullResult(_done(step, words, stats, extras), *full)

    def _checked(self, step: RunStep) -> tuple[StepArrays, Extras | None]:
        check_step(step, self._spec, self._kv, self._states.count if self._states else 0)
        table_pages = self._table_pages if step.mode == "decode" else 0
        arrays = step_arrays(step, self._kv.page_tokens, table_pages, self._states is not None)
        return arrays, extras_of(step, arrays)

    def _in_step(self, step: RunStep, compute: Callable[[], torch.Tensor]) -> tuple[list[int], ExpertStats]:
        """The words that `compute` draws, with the slots' step around it."""
        try:
            self._experts.begin_step(step.mode)
            drawn = compute()
            self._keep_states(step)
            words = self._experts.collect(drawn)
            return words, self._experts.end_step()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which hold the step's tensors
            self._experts.abort_step()
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()  # pieces of the step that failed; none of it waits for a copy any more
                raise _out_of_memory(step, error) from None
            raise

    def _keep_states(self, step: RunStep) -> None:
        """A decode step's snapshots; those of a prefill step are taken inside each layer."""
        if self._states is not None and step.mode == "decode":
            for sequence in step.sequences:
                for _, slot in sequence.snapshots:
                    self._states.copy(sequence.state, slot)

    def _drawn(self, step: RunStep, arrays: StepArrays) -> Drawn:
        if self._graphs is not None and step.mode == "decode":
            drawn = self._graphs(arrays)
            if drawn is not None:
                return drawn
        return forward(self._model, on_device(step, arrays, self._device))

    def _words(self, extras: Extras | None, draw: Callable[[], Drawn]) -> torch.Tensor:
        if extras is None:
            drawn = draw()
            return with_finite(drawn.tokens, drawn)
        tensors = extras_on_device(extras, self._device)
        drawn = draw()
        return with_finite(with_extras(drawn, extras, tensors, self._model.operations.logprobs), drawn)


def _out_of_memory(step: RunStep, error: torch.OutOfMemoryError) -> RequestRefused:
    """What ended the step, and what would leave room for it."""
    tokens = sum(len(sequence.tokens) for sequence in step.sequences)
    cause = ". ".join(str(error).split(". ")[:2])  # after it come figures of a moment, and advice that is not ours
    return RequestRefused(
        "device_out_of_memory",
        f"a {step.mode} step of {tokens} tokens did not fit in the device's memory: {cause}; lower "
        "--chunked-prefill-size or --slots, or raise --vram-reserve-bytes",
    )


def forward(model: Decoder, inputs: StepInputs, logits: torch.Tensor | None = None) -> Drawn:
    """What is drawn from the rows that `inputs` names; their logits in `logits` [R, V] float32, if that is given."""
    hidden = model.hidden(inputs.batch)
    finite = are_finite(hidden, inputs.batch, inputs.rows)
    if inputs.rows.shape[0] == 0:
        return Drawn(inputs.rows, hidden.new_empty(0, model.vocab_size, dtype=torch.float32), finite)
    logits = model.logits(hidden[inputs.rows], logits)
    return Drawn(sample(logits, inputs.sampling), logits, finite)


def are_finite(hidden: torch.Tensor, batch: Batch, rows: torch.Tensor) -> torch.Tensor | None:
    """[B] bool: whether all of a sequence's `hidden` [T, H] are; None if each row is among `rows`, whose logits tell.

    KV or a state that is not finite shows here: each row reads its own, and what it gets of it stays in its residual.
    """
    if rows.shape[0] == hidden.shape[0]:
        return None
    least, most = torch.aminmax(hidden, dim=1)
    finite = torch.isfinite(least) & torch.isfinite(most)
    spans = torch.empty(len(batch.spans), dtype=torch.bool, device=hidden.device)
    for i, span in enumerate(batch.spans):
        torch.all(finite[span.first : span.first + span.rows], dim=0, out=spans[i])
    return spans


def with_finite(words: torch.Tensor, drawn: Drawn) -> torch.Tensor:
    """`words` [W] int64, and behind them what is known of each sequence."""
    return words if drawn.finite is None else torch.cat([words, drawn.finite.to(torch.int64)])


def _done(step: RunStep, words: list[int], stats: ExpertStats, extras: Extras | None) -> StepDone:
    """What came of the step, by its sequences."""
    rows = [i for i, sequence in enumerate(step.sequences) if sequence.sample is not None]
    tokens = [-1] * len(step.sequences)
    for i, token in zip(rows, words, strict=False):  # after the tokens come the log-probabilities
        tokens[i] = token
    if sum(len(sequence.tokens) for sequence in step.sequences) != len(rows):  # see `are_finite`
        words, finite = words[: -len(tokens)], words[-len(tokens) :]
        tokens = [token if good else NOT_FINITE for token, good in zip(tokens, finite, strict=True)]
    if extras is None or not extras.told:
        return StepDone(tokens, stats)
    logprobs: list[Logprobs | None] = [None] * len(step.sequences)
    for row, found in read_logprobs(words[len(rows) :], extras):
        i = rows[row]
        logprobs[i] = found if tokens[i] >= 0 else None
    return StepDone(tokens, stats, logprobs)
