"""Fakes of the slot pool's side: every expert is in a slot from the start."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from copyengine.checkpoint.model import Model, open_model
from copyengine.checkpoint.reader import read_experts
from copyengine.protocol import Dtype
from copyengine.records import record_layout
from kernels.formats import RecordLayout
from worker.dense_steps import DenseSteps
from worker.host_experts import HostExperts
from worker.kv import KvCache
from worker.model import build_model
from worker.model.operations import operations
from worker.protocol import ExpertStats, Mode
from worker.state import StateSlots
from worker.step import StepRunner
from worker.weights import TORCH_DTYPES, load_dense

CPU = torch.device("cpu")


@dataclass
class ResidentGroup:
    experts: list[int]
    slots: list[int]


class ResidentExperts:
    """Expert e of bank l is in slot l * E + e for good; groups hold at most `group` experts."""

    def __init__(self, banks: int, experts: int, group: int = 128) -> None:
        self._experts = experts
        self._group = group
        self.calls: list[str] = []

    def groups(self, layer: int, experts: list[int]) -> Iterator[ResidentGroup]:
        for first in range(0, len(experts), self._group):
            part = experts[first : first + self._group]
            yield ResidentGroup(part, [layer * self._experts + expert for expert in part])

    def begin_step(self, mode: Mode) -> None:
        self.calls.append(f"begin {mode}")

    def collect(self, tokens: torch.Tensor) -> list[int]:
        return [int(token) for token in tokens.tolist()]

    def end_step(self) -> ExpertStats:
        self.calls.append("end")
        return ExpertStats(steps=1)

    def abort_step(self) -> None:
        self.calls.append("abort")


def read_banks(model: Model, record: RecordLayout) -> np.ndarray:
    """[L, E, record_nbytes] uint8, starting on a 128-byte boundary."""
    moe = model.spec.moe
    assert moe is not None
    shape = (len(model.spec.moe_layers), moe.experts, record.record_nbytes)
    banks = aligned(int(np.prod(shape))).reshape(shape)
    read_experts(model, record, list(banks), lambda nbytes: None)
    return banks


def aligned(nbytes: int) -> np.ndarray:
    """[nbytes] uint8 zeros starting on a 128-byte boundary."""
    raw = np.zeros(nbytes + 128, np.uint8)
    first = -raw.ctypes.data % 128
    return raw[first : first + nbytes]


def resident_runner(
    directory: str,
    dtype: Dtype = "float32",
    num_pages: int = 64,
    page_tokens: int = 4,
    group: int = 128,
    state_slots: int = 8,
    deterministic: bool = False,
) -> StepRunner:
    """A StepRunner of the checkpoint in `directory` whose experts are all resident. `state_slots` are those of a model
    that has recurrent state."""
    checkpoint = open_model(directory)
    spec = checkpoint.spec
    kv = KvCache(spec, num_pages, page_tokens, TORCH_DTYPES[dtype], CPU)
    weights, kind = load_dense(checkpoint, dtype, CPU, lambda nbytes: None), operations(deterministic)
    if spec.moe is None:
        return StepRunner(spec, build_model(spec, weights, kv, None, None, kind), kv, DenseSteps())
    record = record_layout(spec, dtype)
    assert record is not None
    pool = torch.from_numpy(read_banks(checkpoint, record).reshape(-1, record.record_nbytes))
    experts = ResidentExperts(len(spec.moe_layers), spec.moe.experts, group)
    fixed = TORCH_DTYPES[dtype] if deterministic else None
    on_host = HostExperts(experts, pool, record, spec.moe.experts, fixed_order_of=fixed)
    states = StateSlots(spec, state_slots, CPU) if spec.state_nbytes else None
    return StepRunner(spec, build_model(spec, weights, kv, on_host, states, kind), kv, experts, states=states)
