"""Decode steps as CUDA graphs, one for each number of sequences: routing, admission, waits and sampling inside."""

from typing import Any

import torch

from worker.model.stack import Decoder
from worker.step import forward
from worker.step_inputs import StepArrays, assemble, pack, packed_nbytes, views


class DecodeGraphs:
    """See worker.step.DecodeGraphs. A size's first step is run without one, which compiles its kernels; its second
    step captures the graph, which takes about as long as the first; from then on it is replayed."""

    def __init__(self, model: Decoder, device: torch.device, max_running: int) -> None:
        """Steps of more than `max_running` sequences are not captured."""
        self._model = model
        self._device = device
        self._max_running = max_running
        self._seen: set[int] = set()
        self._graphs: dict[int, _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, arrays: StepArrays) -> torch.Tensor | None:
        """See worker.step.DecodeGraphs."""
        sequences = len(arrays.tokens)
        if sequences > self._max_running or len(arrays.rows) != sequences:
            return None
        graph = self._graphs.get(sequences)
        if graph is None:
            if sequences not in self._seen:
                self._seen.add(sequences)
                return None
            graph = self._graphs[sequences] = _Graph(self._model, self._device, arrays, self._memory)
        return graph.replay(arrays)

    @property
    def sizes(self) -> list[int]:
        """Numbers of sequences for which there is a graph."""
        return sorted(self._graphs)


class _Graph:
    """The graph of one size, and the memory that its inputs lie in."""

    def __init__(self, model: Decoder, device: torch.device, arrays: StepArrays, memory: Any) -> None:
        nbytes = packed_nbytes(arrays)
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._packed = torch.empty(nbytes, dtype=torch.uint8, device=device)
        inputs = assemble(views(self._packed, arrays), ())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._tokens = forward(model, inputs)

    def replay(self, arrays: StepArrays) -> torch.Tensor:
        """The tokens [B] int64, to be read once the stream has come there. The replay before must be over."""
        pack(arrays, self._host)
        self._packed.copy_(self._host, non_blocking=True)
        self._graph.replay()
        return self._tokens
