"""The tensors of linears that are quantised, whatever the scheme, and how far they are from what they are made of."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from copyengine.checkpoint import fp8, mxfp4, nvfp4
from copyengine.checkpoint.dequantise import Tensors, dequantised
from copyengine.checkpoint.schemes import Scheme


def encode(scheme: Scheme, weights: Sequence[NDArray[np.generic]]) -> list[Tensors]:
    """The tensors of each of `weights`, [N, K] and finite; they share a global, where the scheme has one."""
    match scheme.format:
        case "nvfp4":
            return _nvfp4(scheme, weights)
        case "mxfp4":
            return [dict(zip(("codes", "powers"), mxfp4.quantise(weight), strict=True)) for weight in weights]
        case "fp8_block":
            made = (fp8.quantise(weight, scheme.block) for weight in weights)
            return [dict(zip(("e4m3", "blocks"), of, strict=True)) for of in made]
    raise ValueError(f"no quantiser for {scheme.name}")


def squared_error(weight: NDArray[np.generic], tensors: Tensors, scheme: Scheme) -> tuple[float, float]:
    """Sums over all elements: of the squared error of what `tensors` are when they are read, and of the squared
    weights."""
    error = squares = 0.0
    if "reciprocal" in tensors:
        tensors = {**tensors, "reciprocal": np.float32(1) / tensors["reciprocal"]}  # as it is read
    low = 0
    for made in dequantised(tensors, scheme.block):
        exact = weight[low : low + len(made)].astype(np.float64)
        error += float(np.square(made - exact).sum())
        squares += float(np.square(exact).sum())
        low += len(made)
    return error, squares


def _nvfp4(scheme: Scheme, weights: Sequence[NDArray[np.generic]]) -> list[Tensors]:
    factor = stored = max(nvfp4.global_of(weight) for weight in weights)
    kind = scheme.tensors[-1].kind
    if kind == "reciprocal":
        stored = nvfp4.reciprocal(factor)
        factor = np.float32(1) / stored  # what is read from the file
    made = [nvfp4.quantise(weight, factor) for weight in weights]
    return [{"codes": of.codes, "scales": of.scales.view(np.uint8), kind: np.array(stored)} for of in made]
