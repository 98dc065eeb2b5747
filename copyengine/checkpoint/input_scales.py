"""The scales under which a layer's activations are rounded to FP4: the largest of its experts'.

One for the whole layer, so that what an expert is given does not depend on which experts share a step with it.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from copyengine.checkpoint.files import Files
from copyengine.checkpoint.finish import finish
from copyengine.checkpoint.header import TensorRef
from copyengine.checkpoint.model import Model
from copyengine.checkpoint.names import ExpertName
from copyengine.checkpoint.nvfp4 import E4M3_MAX, MAGNITUDES
from copyengine.checkpoint.parallel import run_all
from copyengine.checkpoint.reader import READER_THREADS, OnBytes
from copyengine.model_spec import ModelSpec

BATCH = 1024
"""Scales that one thread reads before it takes up the next ones."""

MADE_UP = 8.0 / (MAGNITUDES[-1] * E4M3_MAX)
"""Of made-up weights: for activations of up to 8."""

Scales = list[tuple[float, float]]
"""Of each bank: for gate and up, and for down."""


def read_input_scales(model: Model, on_bytes: OnBytes) -> Scales:
    """The layers' scales; empty if activations are not rounded.

    ConfigError, naming the tensor, for one that is not above 0 and finite, or a file that is cut short.
    """
    if not model.inputs:
        return []
    entries = sorted(model.inputs, key=lambda item: (item[1].path, item[1].offset))
    parts = [entries[low : low + BATCH] for low in range(0, len(entries), BATCH)]
    read = run_all([partial(_read, part, on_bytes) for part in parts], READER_THREADS, "input-scales")
    scales = np.zeros((len(model.spec.moe_layers), 2))
    for part, values in zip(parts, read, strict=True):
        for (entry, _), value in zip(part, values, strict=True):
            at = entry.bank, int(entry.field == "down")
            scales[at] = max(scales[at], value)
    return [(float(gate_up), float(down)) for gate_up, down in scales]


def made_up_scales(spec: ModelSpec) -> Scales:
    """Of a model whose weights are made up; empty if activations are not rounded."""
    return [(MADE_UP, MADE_UP)] * len(spec.moe_layers) if spec.expert_format.quantised_inputs else []


def _read(part: Sequence[tuple[ExpertName, TensorRef]], on_bytes: OnBytes) -> list[float]:
    values = []
    with Files() as files:
        for entry, ref in part:
            raw: NDArray[np.uint8] = np.empty(4, np.uint8)
            files.read_into(ref.path, ref.offset, raw.data)
            finish(entry.kind, raw, ref.path, entry.source)
            values.append(raw.view(np.float32).item())
            on_bytes(ref.nbytes)
    return values
