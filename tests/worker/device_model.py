# mypy: allow-untyped-calls
"""A checkpoint on GPU 0: its model, its slots and the copy engine, all in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from copyengine.checkpoint.model import open_model
from copyengine.device.cuda_worker import CudaWorkerDevice, MappedHostMemory
from copyengine.protocol import Dtype
from copyengine.records import record_layout
from tests.worker.device_rig import Rig, on_gpu, rig_on
from tests.worker.resident_experts import read_banks
from worker.backend import Rehearsal
from worker.cuda_backend import as_tensor
from worker.decode_graphs import DecodeGraphs
from worker.geometry import SlotGeometry
from worker.host_memory import HostMemory, zeros_in
from worker.kv import KvCache
from worker.model import build_model
from worker.model.operations import operations
from worker.protocol import Mode, RunStep, Sampling, SequenceStep
from worker.rehearsal import rehearse
from worker.state import StateSlots
from worker.step import StepRunner
from worker.weights import TORCH_DTYPES, load_dense

PAGE_TOKENS = 16
LONGEST = 100
STATE_SLOTS = 8
"""Of a model that has recurrent state."""
GREEDY = Sampling()


class Device:
    """The checkpoint on GPU 0."""

    def __init__(self, rig: Rig, runner: StepRunner, kv: KvCache, graphs: DecodeGraphs | None) -> None:
        self.rig, self.runner, self.kv, self.graphs = rig, runner, kv, graphs

    def prefill(
        self, sequence: int, tokens: list[int], pages: list[int], mode: Mode = "demand", state: int = -1
    ) -> int:
        step = RunStep(mode, [SequenceStep(sequence, tokens, 0, pages, GREEDY, state)])
        token: int = self.runner.run(step).tokens[0]
        return token


@contextmanager
def device_model(
    directory: str,
    dtype: Dtype,
    slots: int = 20,
    graphs: bool = False,
    in_host_memory: bool = False,
    deterministic: bool = False,
) -> Iterator[Device]:
    """`in_host_memory`: the token embedding and the KV pages are, pinned."""
    checkpoint = open_model(directory)
    spec, moe = checkpoint.spec, checkpoint.spec.moe
    assert moe is not None
    record = record_layout(spec, dtype)
    assert record is not None
    geometry = SlotGeometry(
        len(spec.moe_layers), moe.experts, record.record_nbytes, slots, 2, min(8, moe.experts), logged_steps=8
    )
    place = on_gpu()
    with rig_on(place, geometry, record, list(read_banks(checkpoint, record)), fixed=deterministic) as rig:
        kind, where = TORCH_DTYPES[dtype], place.torch_device
        mapped: list[MappedHostMemory] = []

        def allocate_host(nbytes: int) -> HostMemory:
            assert isinstance(place.device, CudaWorkerDevice)
            mapped.append(place.device.allocate_host(nbytes))
            return HostMemory(as_tensor(mapped[-1], nbytes), mapped[-1].array)

        allocate = allocate_host if in_host_memory else None
        kv = KvCache(spec, 64, PAGE_TOKENS, kind, where, zeros_in(allocate) if allocate else None)
        weights = load_dense(checkpoint, dtype, where, lambda _: None, allocate)
        states = StateSlots(spec, STATE_SLOTS, where) if spec.state_nbytes else None
        model = build_model(spec, weights, kv, rig.slots, states, operations(deterministic))
        by_graph = DecodeGraphs(model, where, 8) if graphs else None
        load_kernels(Rehearsal(spec, model, kv, rig.slots, 8, LONGEST, 8))
        yield Device(rig, StepRunner(spec, model, kv, rig.slots, 8, by_graph, states), kv, by_graph)
        torch.cuda.synchronize()
        for memory in mapped:
            memory.close()
    place.close()


@torch.inference_mode()
def load_kernels(rehearsal: Rehearsal) -> None:
    """All that steps of up to LONGEST tokens launch, whole or by run_full: a first launch may wait for a stream that
    waits for the copies, which this process makes."""
    rehearse(rehearsal)
    for layer in rehearsal.kv.layers:
        layer.k.zero_()
        layer.v.zero_()
    hidden = torch.zeros(LONGEST, rehearsal.spec.hidden, dtype=rehearsal.kv.layers[0].k.dtype, device="cuda")
    for rows in range(1, LONGEST + 1):
        logits = rehearsal.model.logits(hidden[:rows])
    logits[torch.zeros(1, dtype=torch.int64, device="cuda")]
    torch.cuda.synchronize()


def prompt(length: int, seed: int) -> list[int]:
    """Tokens of a vocabulary of 512."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 512, length)]
