"""config.json's quantization_config -> how the linears of a model are quantised, for all families alike."""

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from copyengine.checkpoint.directory import HF_QUANT_CONFIG
from copyengine.checkpoint.keys import Keys, integer, integers, nested, show, wrong
from copyengine.checkpoint.module_patterns import Patterns, patterns
from copyengine.checkpoint.schemes import (
    COMPRESSED_TENSORS,
    FP8,
    FP8_INV,
    FUSED_MXFP4,
    MODELOPT,
    MODELOPT_FP8,
    Scheme,
    fp8_block,
)
from copyengine.families.packed_groups import GroupsError, Packed, packed_groups
from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import ConfigError
from kernels.formats import NVFP4_BLOCK

MODELOPT_METHODS = ("modelopt", "modelopt_fp4")
"""How ModelOpt's own exports and what other engines make of them name the method."""

MODELOPT_ALGORITHMS: Mapping[object, Scheme] = {"NVFP4": MODELOPT, "FP8": MODELOPT_FP8}
IGNORED_KEYS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
"""Lists of what is not quantised, as different tools call them."""

EXPERTS = patterns([r"re:.*\.experts(\.|$)"])
EVERYTHING = patterns(["*"])
NOTHING = patterns([])


class Rule(Struct, frozen=True):
    """The linears with these names are quantised so."""

    targets: Patterns
    scheme: Scheme


class Quantisation(Struct, frozen=True):
    """What a quantization_config says."""

    rules: tuple[Rule, ...]  # the first that matches counts
    ignored: Patterns = NOTHING
    others: tuple[Scheme, ...] = ()  # that linears outside the experts may be written in too
    quantised_inputs: bool = False  # activations before quantised linears are to be quantised as well

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All that a linear may be written in."""
        return tuple(dict.fromkeys((*(rule.scheme for rule in self.rules), *self.others)))

    def scheme_of(self, linear: str) -> Scheme | None:
        """How the linear of that name is quantised; None if it is not."""
        if self.ignored.match(linear):
            return None
        return next((rule.scheme for rule in self.rules if rule.targets.match(linear)), None)


def quantisation(config: Keys) -> Quantisation | None:
    """What quantization_config says; None if there is none.

    Known are ModelOpt's NVFP4, FP8 and MIXED_PRECISION of them, with the keys in quantization_config itself or in
    `quantization` inside it; compressed-tensors' NVFP4, MXFP4 and FP8; "fp8" in blocks or per tensor; and gpt-oss'
    "mxfp4". ConfigError
    names any other quantisation, and contradictions between config.json and ModelOpt's own hf_quant_config.json.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return None
    found = _parse(stated)
    other = config.get(HF_QUANT_CONFIG)
    if isinstance(other, Mapping) and _parse({"quant_method": "modelopt", **other}) != found:
        raise ConfigError(
            f"config.json: quantization_config and {HF_QUANT_CONFIG} beside it say different things of what is "
            "quantised and what is left out; remove the one that is wrong"
        )
    return found


def with_quantised_inputs(spec: ModelSpec, config: Keys) -> ModelSpec:
    """`spec` with activations rounded to FP4 before its experts. ConfigError if the checkpoint is not made for that."""
    stated = quantisation(config)
    kind = spec.expert_format
    if spec.moe is None or kind.name != "nvfp4":
        raise _plain(f"experts are {kind.name or 'not quantised'}" if spec.moe else "the model has no experts")
    if stated is None or not stated.quantised_inputs:
        raise _plain("config.json says that activations are not quantised (input_activations)")
    return replace(spec, expert_format=replace(kind, quantised_inputs=True))


def _plain(why: str) -> ConfigError:
    return ConfigError(
        f"--expert-activations w4a4: {why}; it takes a checkpoint of NVFP4 experts with input scales: use "
        "--expert-activations plain"
    )


def _parse(stated: object) -> Quantisation:
    if not isinstance(stated, Mapping):
        raise unsupported(f"is {show(stated)}, no object,")
    method = stated.get("quant_method")
    parse = _METHODS.get(method) if isinstance(method, str) else None
    if parse is None:
        raise unsupported(f"(quant_method {show(method)})")
    return parse(stated)


def _packed(stated: Keys) -> Quantisation:
    try:
        groups = packed_groups(stated)
    except GroupsError as error:
        raise unsupported(f"(quant_method 'compressed-tensors', {error})") from None
    return Quantisation(
        tuple(Rule(_patterns("targets", group.targets), group.scheme) for group in _specific_first(groups)),
        _ignored(stated),
        quantised_inputs=any(group.quantised_inputs for group in groups),
    )


def _specific_first(groups: list[Packed]) -> list[Packed]:
    """A group of all linears comes after those that name some."""
    return sorted(groups, key=lambda group: "*" in group.targets)


def _fp8(stated: Keys) -> Quantisation:
    if stated.get("fmt") not in (None, "e4m3"):
        raise unsupported(f"(quant_method 'fp8', fmt {show(stated['fmt'])})")
    block = integers(stated, "weight_block_size")
    if block and (len(block) != 2 or min(block) < 1):
        raise wrong("weight_block_size", block, "must be two numbers of at least 1, rows and columns")
    scheme, others = (fp8_block(*block), ()) if block else (FP8, (FP8_INV,))
    return Quantisation((Rule(EVERYTHING, scheme),), _ignored(stated), others)


def _fused_mxfp4(stated: Keys) -> Quantisation:
    return Quantisation((Rule(EXPERTS, FUSED_MXFP4),), _ignored(stated))


def _modelopt(stated: Keys) -> Quantisation:
    keys = stated if stated.get("quant_algo") is not None else nested(stated, "quantization")
    algorithm = keys.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers = nested(keys, "quantized_layers")
        algorithm, rules = _algorithm_of_experts(layers), _rules_of_layers(layers)
    else:
        rules = ()
    scheme = MODELOPT_ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    if scheme is None and (algorithm is not None or not rules):
        raise unsupported(f"(quant_method {show(stated.get('quant_method'))}, quant_algo {show(algorithm)})")
    block = integer(keys, "group_size", default=NVFP4_BLOCK)
    if block != NVFP4_BLOCK and scheme is MODELOPT:
        raise wrong("group_size", block, f"must be {NVFP4_BLOCK} for NVFP4")
    if scheme is not None:
        rules = (*rules, Rule(EXPERTS if rules else EVERYTHING, scheme))
    others = tuple(MODELOPT_ALGORITHMS.values())
    return Quantisation(rules, _ignored(keys), others, quantised_inputs=scheme is MODELOPT)


def _rules_of_layers(layers: Keys) -> tuple[Rule, ...]:
    """Of MIXED_PRECISION's linears outside the experts; of algorithms that are not known, the files decide."""
    named: dict[Scheme, list[str]] = {}
    for name, layer in layers.items():
        algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
        if isinstance(algorithm, str) and algorithm in MODELOPT_ALGORITHMS and ".experts" not in name:
            named.setdefault(MODELOPT_ALGORITHMS[algorithm], []).append(name)
    return tuple(Rule(_patterns("quantized_layers", names), scheme) for scheme, names in named.items())


def _algorithm_of_experts(layers: Keys) -> object:
    """What is stated for every tensor of experts alike; ConfigError if it is more than one algorithm, None if none."""
    algorithms = [
        layer.get("quant_algo") if isinstance(layer, Mapping) else layer
        for name, layer in layers.items()
        if ".experts" in name
    ]
    for other in algorithms[1:]:
        if other != algorithms[0]:
            raise unsupported(f"(experts as {show(algorithms[0])} and as {show(other)})")
    return algorithms[0] if algorithms else None


def _ignored(keys: Keys) -> Patterns:
    names: list[str] = []
    for key in IGNORED_KEYS:
        value = keys.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
            raise wrong(key, value, "must be a list of names")
        names += value
    return _patterns("ignore", names)


def _patterns(key: str, names: list[str]) -> Patterns:
    try:
        return patterns(names)
    except ValueError as error:
        raise ConfigError(f"config.json: {key}: {error}") from None


def unsupported(what: str) -> ConfigError:
    """The refusal of a quantization_config."""
    return ConfigError(
        f"config.json: quantization_config {what} is not supported; use a bfloat16, float16 or float32 checkpoint, "
        f"{MODELOPT.name} or FP8, {COMPRESSED_TENSORS.name}, MXFP4 or FP8, or FP8 in blocks"
    )


_METHODS: Mapping[str, Callable[[Keys], Quantisation]] = {
    **dict.fromkeys(MODELOPT_METHODS, _modelopt),
    "compressed-tensors": _packed,
    "fp8": _fp8,
    "mxfp4": _fused_mxfp4,
}
