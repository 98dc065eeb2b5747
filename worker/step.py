"""One step: RunStep in, tokens out. Checks what was asked, runs the model, draws the tokens."""

import traceback
from typing import NamedTuple, Protocol

import torch

from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import RequestRefused
from kernels.sampling import sample
from worker.kv import KvCache
from worker.model.stack import Decoder
from worker.protocol import ExpertStats, Mode, RunStep
from worker.step_check import check_step
from worker.step_inputs import StepArrays, StepInputs, on_device, step_arrays


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

    def collect(self, tokens: torch.Tensor) -> list[int]:
        """The step's `tokens` [R] int64 on the host, once all that was computed is done."""
        ...

    def end_step(self) -> ExpertStats: ...

    def abort_step(self) -> None: ...


class DecodeGraphs(Protocol):
    """Decode steps as graphs."""

    def __call__(self, arrays: StepArrays) -> torch.Tensor | None:
        """The tokens [B] int64 of a decode step, computed by a graph; None if there is none yet for its size."""
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
    ) -> None:
        """Decode steps come by page tables of `table_pages` pages, if not 0."""
        self._spec = spec
        self._model = model
        self._kv = kv
        self._experts = experts
        self._table_pages = table_pages
        self._graphs = graphs
        self._device = kv.layers[0].k.device

    def run(self, step: RunStep) -> StepResult:
        """Runs the step. RequestRefused("invalid_request") if it asks for what is not there; nothing has run then.

        RequestRefused("bad_logits") if there is a token to draw from logits that are not finite. Whatever else fails
        while it runs is raised after the slots were told to drop what did not land; RequestRefused("out_of_memory") if
        the device had too little left. The KV of the step's new positions is undefined after either.
        """
        arrays = self._checked(step)
        with torch.inference_mode():
            tokens, stats = self._in_step(step, lambda: self._tokens(step, arrays))
        return StepResult(_by_sequence(step, tokens), stats)

    def run_full(self, step: RunStep) -> FullResult:
        """Like `run`, with the hidden states and logits of every position: for tests and for scoring."""
        arrays = self._checked(step)
        full: list[torch.Tensor] = []

        def tokens() -> torch.Tensor:
            inputs = on_device(step, arrays, self._device)
            full.append(self._model.hidden(inputs.batch))
            full.append(self._model.logits(full[0]))
            return sample(full[1][inputs.rows], inputs.sampling)

        with torch.inference_mode():
            drawn, stats = self._in_step(step, tokens)
        return FullResult(StepResult(_by_sequence(step, drawn), stats), *full)

    def _checked(self, step: RunStep) -> StepArrays:
        check_step(step, self._spec, self._kv)
        return step_arrays(step, self._kv.page_tokens, self._table_pages if step.mode == "decode" else 0)

    def _in_step(self, step: RunStep, compute: "_Compute") -> tuple[list[int], ExpertStats]:
        """What `compute` draws, with the slots' step around it."""
        try:
            self._experts.begin_step(step.mode)
            tokens = self._experts.collect(compute())
            return tokens, self._experts.end_step()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which hold the step's tensors
            self._experts.abort_step()
            if isinstance(error, torch.OutOfMemoryError):
                raise RequestRefused("out_of_memory", f"{error}; lower --chunked-prefill-size or --slots") from None
            raise

    def _tokens(self, step: RunStep, arrays: StepArrays) -> torch.Tensor:
        if self._graphs is not None and step.mode == "decode":
            tokens = self._graphs(arrays)
            if tokens is not None:
                return tokens
        return forward(self._model, on_device(step, arrays, self._device))


class _Compute(Protocol):
    def __call__(self) -> torch.Tensor: ...


def forward(model: Decoder, inputs: StepInputs) -> torch.Tensor:
    """The tokens [R] int64 drawn from the rows that `inputs` names; -1 where the logits are not finite."""
    hidden = model.hidden(inputs.batch)
    if inputs.rows.shape[0] == 0:
        return inputs.rows
    return sample(model.logits(hidden[inputs.rows]), inputs.sampling)


def _by_sequence(step: RunStep, drawn: list[int]) -> list[int]:
    """[B] the tokens of the step's sequences. RequestRefused("bad_logits")."""
    tokens = iter(drawn)
    by_sequence = [next(tokens) if sequence.sample is not None else -1 for sequence in step.sequences]
    for sequence, token in zip(step.sequences, by_sequence, strict=True):
        if sequence.sample is not None and token < 0:
            raise RequestRefused(
                "bad_logits",
                f"the model's logits of sequence {sequence.sequence} are not finite: NaN or infinity in the weights, "
                "or an overflow of the element type; try --dtype float32",
            )
    return by_sequence
