"""Every kernel once, before anything waits for a copy.

A kernel is compiled and loaded when it is launched for the first time, and the driver may hold all other work of the
process back while it loads one. In a step whose stream waits for the copy engine that is a long time to the first token
at best; with the copy engine as a thread of the same process it is a deadlock.
"""

import torch

from worker.device_slots import DeviceSlots
from worker.kv import KvCache
from worker.model.stack import Decoder
from worker.protocol import Mode, RunStep, Sampling, SequenceStep
from worker.step import forward
from worker.step_inputs import on_device, step_arrays

BATCHES = (1, 2, 16)
"""Numbers of sequences in a decode step that Triton compiles for: 1, those that 16 divides, and all others."""

SETTINGS = (Sampling(), Sampling(temperature=0.7, top_k=20, top_p=0.9))


@torch.inference_mode()
def rehearse(
    model: Decoder, kv: KvCache, slots: DeviceSlots | None, table_pages: int, largest_step: int, max_running: int
) -> None:
    """Steps of every kind and of up to `largest_step` rows, which mean nothing; pages may hold anything after it."""
    longest = min(largest_step, kv.num_pages * kv.page_tokens)
    sizes = [size for size in (1, 2, *(16 << i for i in range(16))) if size < longest] + [longest]
    steps: list[tuple[Mode, int]] = [("demand", size) for size in sizes] + [("streamed", size) for size in sizes]
    steps += [("decode", batch) for batch in BATCHES if batch <= min(max_running, kv.num_pages)]
    for mode, rows in steps:
        step = _step(mode, rows, kv.page_tokens)
        arrays = step_arrays(step, kv.page_tokens, table_pages if mode == "decode" else 0)
        inputs = on_device(step, arrays, kv.layers[0].k.device)
        if slots is None:
            forward(model, inputs)
            continue
        with slots.rehearsal(mode):
            forward(model, inputs)


def _step(mode: Mode, rows: int, page_tokens: int) -> RunStep:
    """One sequence of `rows` new tokens; or of a decode step `rows` sequences of one, on a page each."""
    if mode == "decode":
        return RunStep(mode, [SequenceStep(i, [0], 0, [i], SETTINGS[i % 2]) for i in range(rows)])
    return RunStep(mode, [SequenceStep(0, [0] * rows, 0, list(range(-(-rows // page_tokens))), SETTINGS[rows % 2])])
