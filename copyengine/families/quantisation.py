"""config.json's quantization_config -> the format of a model's expert records, for all families alike."""

from collections.abc import Mapping

from copyengine.checkpoint.keys import Keys, integer, nested, show, wrong
from copyengine.wire.errors import ConfigError
from kernels.formats import NVFP4_BLOCK

METHODS = ("modelopt", "modelopt_fp4")
"""How ModelOpt's own exports and what other engines make of them name the method."""


def expert_format(config: Keys) -> str:
    """A name of kernels.formats, or "" for experts that are not quantised. What else is quantised is not asked here.

    Known is ModelOpt's NVFP4, with its keys in quantization_config itself or in `quantization` inside it, and its
    MIXED_PRECISION where all experts among the `quantized_layers` are NVFP4. ConfigError names any other quantisation.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return ""
    if not isinstance(stated, Mapping):
        raise _unsupported(f"is {show(stated)}, no object,")
    method = stated.get("quant_method")
    keys = stated if stated.get("quant_algo") is not None else nested(stated, "quantization")
    algorithm = keys.get("quant_algo")
    if method not in METHODS:
        raise _unsupported(f"(quant_method {show(method)})")
    if algorithm == "MIXED_PRECISION":
        algorithm = _algorithm_of_experts(nested(keys, "quantized_layers"))
    if algorithm != "NVFP4":
        raise _unsupported(f"(quant_method {show(method)}, quant_algo {show(algorithm)})")
    block = integer(keys, "group_size", default=NVFP4_BLOCK)
    if block != NVFP4_BLOCK:
        raise wrong("group_size", block, f"must be {NVFP4_BLOCK} for NVFP4")
    return "nvfp4"


def _algorithm_of_experts(layers: Keys) -> object:
    """What is stated for every tensor of experts alike; ConfigError if it is more than one algorithm, None if none."""
    algorithms = [
        layer.get("quant_algo") if isinstance(layer, Mapping) else layer
        for name, layer in layers.items()
        if ".experts" in name
    ]
    for other in algorithms[1:]:
        if other != algorithms[0]:
            raise _unsupported(f"(experts as {show(algorithms[0])} and as {show(other)})")
    return algorithms[0] if algorithms else None


def _unsupported(what: str) -> ConfigError:
    return ConfigError(
        f"config.json: quantization_config {what} is not supported; use a bfloat16, float16 or float32 checkpoint, "
        "or ModelOpt's NVFP4"
    )
