"""config.json's quantization_config -> the format of a model's expert records, for all families alike."""

from collections.abc import Mapping

from copyengine.checkpoint.keys import Keys, integer, nested, show, wrong
from copyengine.checkpoint.schemes import COMPRESSED_TENSORS, MODELOPT, Scheme
from copyengine.wire.errors import ConfigError
from kernels.formats import NVFP4_BLOCK, ExpertFormat

MODELOPT_METHODS = ("modelopt", "modelopt_fp4")
"""How ModelOpt's own exports and what other engines make of them name the method."""

PACKED_FORMAT = "nvfp4-pack-quantized"
PACKED_WEIGHTS: Keys = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_BLOCK}
"""What compressed-tensors states of NVFP4 weights, apart from what may be left out."""


def expert_format(config: Keys) -> ExpertFormat:
    """What quantization_config says of the experts' records. ConfigError as for `expert_scheme`."""
    scheme = expert_scheme(config)
    return ExpertFormat(scheme.format if scheme else "")


def expert_scheme(config: Keys) -> Scheme | None:
    """How the files spell quantised experts; None if they are not quantised. What else is quantised is not asked here.

    Known is ModelOpt's NVFP4, with its keys in quantization_config itself or in `quantization` inside it, and its
    MIXED_PRECISION where all experts among the `quantized_layers` are NVFP4; and compressed-tensors' NVFP4, with
    activations quantised or not. ConfigError names any other quantisation.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise _unsupported(f"is {show(stated)}, no object,")
    method = stated.get("quant_method")
    if method == "compressed-tensors":
        _check_packed(stated)
        return COMPRESSED_TENSORS
    if method not in MODELOPT_METHODS:
        raise _unsupported(f"(quant_method {show(method)})")
    _check_modelopt(stated)
    return MODELOPT


def _check_modelopt(stated: Keys) -> None:
    keys = stated if stated.get("quant_algo") is not None else nested(stated, "quantization")
    algorithm = keys.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        algorithm = _algorithm_of_experts(nested(keys, "quantized_layers"))
    if algorithm != "NVFP4":
        raise _unsupported(f"(quant_method {show(stated.get('quant_method'))}, quant_algo {show(algorithm)})")
    block = integer(keys, "group_size", default=NVFP4_BLOCK)
    if block != NVFP4_BLOCK:
        raise wrong("group_size", block, f"must be {NVFP4_BLOCK} for NVFP4")


def _check_packed(stated: Keys) -> None:
    """Every group of layers has its weights in NVFP4."""
    groups = nested(stated, "config_groups")
    if not groups:
        raise _unsupported("(quant_method 'compressed-tensors', no config_groups)")
    for name in groups:
        group = nested(groups, name)
        packing = group.get("format") or stated.get("format")
        if packing != PACKED_FORMAT:
            raise _unsupported(f"(quant_method 'compressed-tensors', {name} with format {show(packing)})")
        weights = nested(group, "weights")
        for key, value in PACKED_WEIGHTS.items():
            if weights.get(key) != value:
                raise _unsupported(f"({PACKED_FORMAT}, {name} with {key} {show(weights.get(key))}, not {value!r},)")


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
        f"{MODELOPT.name} or {COMPRESSED_TENSORS.name}"
    )
