"""Every kernel once, before anything waits for a copy.

A kernel is compiled and loaded when it is launched for the first time, and the driver may hold all other work of the
process back while it loads one. In a step whose stream waits for the copy engine that is a long time to the first token
at best; with the copy engine as a thread of the same process it is a deadlock.
"""

from collections.abc import Callable, Hashable

import torch

from kernels.grouped_gemm import variant
from worker.backend import Rehearsal
from worker.device_slots import DeviceSlots
from worker.drawing import BLOCK_ROWS, Drawn, Extras, extras_of, extras_on_device, with_extras
from worker.protocol import Changes, Mode, RunStep, Sampling, SequenceStep
from worker.step import forward, with_finite
from worker.step_inputs import StepInputs, on_device, step_arrays

SETTINGS = (Sampling(), Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01))
EVERYTHING = Sampling(
    changes=Changes(2.0, 0.5, 0.5, seen=bytes(4), counts=bytes(4), bias={0: 1.0}, allowed=b"\1\0\0\0"), logprobs=1
)


@torch.inference_mode()
def rehearse(rehearsal: Rehearsal) -> None:
    """Steps of every kind and of all sizes, which mean nothing; pages may hold anything after it.

    Of recurrent states they name none: they go on from zeros, and leave nothing.
    """
    kv, slots = rehearsal.kv, rehearsal.slots
    assert slots is None or isinstance(slots, DeviceSlots)
    longest = min(rehearsal.largest_step, kv.num_pages * kv.page_tokens)
    moe = rehearsal.spec.moe
    experts_per_token = moe.experts_per_token if moe else 1
    sizes = sizes_to_rehearse(longest, lambda tokens: kernels_of(tokens, experts_per_token, slots))
    steps: list[tuple[Mode, int]] = [("demand", size) for size in sizes]
    steps += [("streamed", size) for size in (sizes[0], longest)]
    steps += [("decode", batch) for batch in range(1, min(rehearsal.max_running, kv.num_pages) + 1)]
    steps.sort(key=lambda step: -step[1])  # what torch keeps of the largest one then serves all others
    for mode, rows in steps:
        step = _step(mode, rows, kv.page_tokens)
        table_pages = rehearsal.table_pages if mode == "decode" else 0
        arrays = step_arrays(step, kv.page_tokens, table_pages, recurrent=rehearsal.spec.state_nbytes > 0)
        inputs = on_device(step, arrays, kv.device)
        if slots is None:
            _compute(rehearsal, inputs)
            continue
        with slots.rehearsal(mode):
            _compute(rehearsal, inputs)
    for rows in range(1, BLOCK_ROWS + 1):
        logits = torch.zeros(rows, rehearsal.model.vocab_size, device=kv.device)
        extras = extras_of_a_block(rows)
        tensors = extras_on_device(extras, logits.device)
        drawn = Drawn(logits[:, 0].to(torch.int64), logits)
        with_extras(drawn, extras, tensors, rehearsal.model.operations.logprobs)


def _compute(rehearsal: Rehearsal, inputs: StepInputs) -> None:
    drawn = forward(rehearsal.model, inputs)
    with_finite(drawn.tokens, drawn)


def extras_of_a_block(rows: int) -> Extras:
    """All that a step of `rows` sequences can want beyond a plain draw."""
    step = RunStep("decode", [SequenceStep(i, [0], 0, [i], EVERYTHING) for i in range(rows)])
    extras = extras_of(step, step_arrays(step, 1))
    assert extras
    return extras


def sizes_to_rehearse(longest: int, kernels: Callable[[int], Hashable]) -> list[int]:
    """Numbers of tokens, ascending, of which one runs the kernels of each number up to `longest`, that one included."""
    first: dict[Hashable, int] = {}
    for tokens in range(1, longest + 1):
        first.setdefault(kernels(tokens), tokens)
    return sorted({*first.values(), longest})


def kernels_of(tokens: int, k: int, slots: DeviceSlots | None) -> Hashable:
    """Steps of this many tokens for which it is equal run the same kernels.

    Those compile for powers of two, and have no argument, but for a stride, that Triton would compile for by its value.
    """
    compiled = (tokens == 1, (tokens * k - 1).bit_length())
    if slots is None:
        return compiled
    return compiled, variant(tokens, k, slots.geometry.experts, slots.layout, slots.pool.device)


def _step(mode: Mode, rows: int, page_tokens: int) -> RunStep:
    """One sequence of `rows` new tokens; or of a decode step `rows` sequences of one, on a page each."""
    if mode == "decode":
        return RunStep(mode, [SequenceStep(i, [0], 0, [i], SETTINGS[i % 2]) for i in range(rows)])
    return RunStep(mode, [SequenceStep(0, [0] * rows, 0, list(range(-(-rows // page_tokens))), SETTINGS[rows % 2])])
