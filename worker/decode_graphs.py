"""Decode steps as CUDA graphs, one for each number of sequences: routing, admission, waits and sampling inside."""

from typing import Any

import numpy as np
import torch

from copyengine.wire.logs import Log
from worker.drawing import Drawn
from worker.model.stack import Decoder
from worker.step import forward
from worker.step_inputs import StepArrays, assemble, pack, packed_nbytes, views

log = Log(__name__)


class DecodeGraphs:
    """See worker.step.DecodeGraphs. A size's first step is run without one, which compiles its kernels; its second
    step captures the graph, which takes about as long as the first; from then on it is replayed.

    The largest size is captured before any other: the graphs share what memory their steps take, and torch would take
    more for each larger one (2.3 GB instead of 0.1 for 1 to 64 sequences of Flash-Next's vocabulary; H200, 2026-11).
    """

    def __init__(self, model: Decoder, device: torch.device, max_running: int) -> None:
        """Steps of more than `max_running` sequences are not captured."""
        self._model = model
        self._device = device
        self._max_running = max_running
        self._seen: set[int] = set()
        self._graphs: dict[int, _Graph | None] = {}  # None: it could not be captured
        self._memory = torch.cuda.graph_pool_handle()
        self._logits: torch.Tensor | None = None  # [max_running, V] float32 of the last replay, whatever its size

    def __call__(self, arrays: StepArrays) -> Drawn | None:
        """See worker.step.DecodeGraphs."""
        sequences = len(arrays.tokens)
        if sequences > self._max_running or len(arrays.rows) != sequences:
            return None
        if sequences not in self._seen:
            self._seen.add(sequences)
            return None
        if not self._graphs:
            self._graphs[self._max_running] = self._capture(of_sequences(arrays, self._max_running))
        if sequences not in self._graphs:
            self._graphs[sequences] = self._capture(arrays)
        graph = self._graphs[sequences]
        return graph.replay(arrays) if graph else None

    def _capture(self, arrays: StepArrays) -> "_Graph | None":
        """The graph, or None if there is too little memory for it, say: then the size goes on without one."""
        try:
            if self._logits is None:
                shape = (self._max_running, self._model.vocab_size)
                self._logits = torch.empty(shape, dtype=torch.float32, device=self._device)
            return _Graph(self._model, self._device, arrays, self._memory, self._logits[: len(arrays.rows)])
        except RuntimeError as error:  # of torch; if the device is broken, the step's other launches show it
            log.warning("graph_failed", sequences=len(arrays.tokens), detail=str(error))
            return None

    @property
    def sizes(self) -> list[int]:
        """Numbers of sequences for which there is a graph."""
        return sorted(size for size, graph in self._graphs.items() if graph)


def of_sequences(arrays: StepArrays, sequences: int) -> StepArrays:
    """Those of a decode step of that many sequences, which all are the first of `arrays`: to be captured, not run."""
    few = len(arrays.tokens)
    first = {
        name: np.repeat(array[:1], sequences, axis=0) if len(array) == few else array
        for name, array in arrays._asdict().items()
    }
    return arrays._replace(**first | {"rows": np.arange(sequences)})


class _Graph:
    """The graph of one size, and the memory that its inputs lie in."""

    def __init__(
        self, model: Decoder, device: torch.device, arrays: StepArrays, memory: Any, logits: torch.Tensor
    ) -> None:
        """Its logits go to `logits` [B, V] float32, for rows that want more than a plain draw."""
        nbytes = packed_nbytes(arrays)
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._packed = torch.empty(nbytes, dtype=torch.uint8, device=device)
        inputs = assemble(views(self._packed, arrays), ())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._drawn = forward(model, inputs, logits)

    def replay(self, arrays: StepArrays) -> Drawn:
        """What it draws, to be read once the stream has come there. The replay before must be over."""
        pack(arrays, self._host)
        self._packed.copy_(self._host, non_blocking=True)
        self._graph.replay()
        return self._drawn
