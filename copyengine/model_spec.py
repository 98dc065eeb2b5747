"""config.json -> ModelSpec: what a model is made of, without its weights and without torch.

A layer is a composition of kinds: `LayerSpec.attention` and `LayerSpec.ffn` are tagged unions, so that a further kind
is a further Struct. Nothing here assumes that all layers are alike.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec import Struct

from copyengine.checkpoint.keys import Keys, flag, integer, integers, nested, number, show, stated, wrong
from copyengine.wire.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
"""Element types a checkpoint may have."""

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")

MAX_LAYERS = 4096
MAX_EXPERTS = 65536
"""Beyond these a config.json is taken for damaged."""


class RopeSpec(Struct, frozen=True):
    """Rotary embedding: its base and how it is scaled beyond the trained length.

    `kind` is "default", "linear", "dynamic", "yarn" or "llama3"; the other fields are those of the kind, as Hugging
    Face's `rope_parameters` names them. Only YaRN's fields are listed that the others do not share.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


class GqaSpec(Struct, frozen=True, tag="gqa"):
    """Grouped-query attention with per-head q/k norm and rotary."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    rope: RopeSpec
    o_bias: bool = False  # the output projection has a bias too (attention_bias of Qwen3)


class DenseSpec(Struct, frozen=True, tag="dense"):
    """A gated SiLU MLP of intermediate size `intermediate`."""

    intermediate: int


class MoeSpec(Struct, frozen=True, tag="moe"):
    """A routed mixture: softmax over E, top-K, renormalised over the K if `norm_topk_prob`."""

    experts: int  # E
    experts_per_token: int  # K
    intermediate: int  # I
    norm_topk_prob: bool


class LayerSpec(Struct, frozen=True):
    """One decoder layer. Exactly the layers whose ffn is a MoeSpec have a bank; their order numbers the banks."""

    attention: GqaSpec
    ffn: DenseSpec | MoeSpec


class ModelSpec(Struct, frozen=True):
    """A model of a known family."""

    architecture: str  # e.g. "Qwen3MoeForCausalLM"
    vocab_size: int
    hidden: int  # H
    norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    checkpoint_dtype: str  # "bfloat16", "float16" or "float32", as config.json states it
    layers: tuple[LayerSpec, ...]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a bank; bank number l belongs to layer moe_layers[l]."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))

    @property
    def moe(self) -> MoeSpec | None:
        """The MoE geometry, which all MoE layers of a model share; None for a dense model."""
        return next((layer.ffn for layer in self.layers if isinstance(layer.ffn, MoeSpec)), None)


def parse_spec(config: Keys) -> ModelSpec:
    """The model that a config.json describes, in either spelling of its keys (hub files' or transformers 5's).

    ConfigError names the key, its value and the fix; nothing else is raised, whatever `config` holds.
    """
    architecture = _architecture(config)
    quantisation = config.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise ConfigError(
            f"config.json: quantization_config (quant_method {show(method)}) is not supported; "
            "use a bfloat16, float16 or float32 checkpoint"
        )
    return FAMILIES[architecture](architecture, config)


def checkpoint_dtype(config: Keys) -> str | None:
    """The element type that config.json states (`dtype` or `torch_dtype`); None if it states none."""
    name = stated(config, "dtype", "torch_dtype")
    value = config.get(name) if name else None
    if value is None or value == "auto":
        return None
    dtype = value.removeprefix("torch.") if isinstance(value, str) else ""
    if dtype not in DTYPES:
        raise wrong(name or "dtype", value, f"must be one of {', '.join(DTYPES)}")
    return dtype


# Families -----------------------------------------------------------------------------------------------------------


def _qwen3(architecture: str, config: Keys) -> ModelSpec:
    attention = _gqa(config, default_head_dim=128)
    layers = integer(config, "num_hidden_layers", high=MAX_LAYERS)
    ffn = DenseSpec(integer(config, "intermediate_size"))
    return _decoder(architecture, config, tuple(LayerSpec(attention, ffn) for _ in range(layers)))


def _qwen3_moe(architecture: str, config: Keys) -> ModelSpec:
    """A layer is sparse as transformers' Qwen3MoeDecoderLayer decides it."""
    attention = _gqa(config, default_head_dim=None)
    count = integer(config, "num_hidden_layers", high=MAX_LAYERS)
    experts = integer(config, "num_experts", "num_local_experts", low=0, high=MAX_EXPERTS)
    step = integer(config, "decoder_sparse_step", default=1)
    dense_layers = set(integers(config, "mlp_only_layers"))
    sparse = [i not in dense_layers and experts > 0 and (i + 1) % step == 0 for i in range(count)]
    moe = _moe(config, experts) if any(sparse) else None
    dense = None if all(sparse) else DenseSpec(integer(config, "intermediate_size"))
    ffns = [moe if is_sparse else dense for is_sparse in sparse]
    return _decoder(architecture, config, tuple(LayerSpec(attention, ffn) for ffn in ffns if ffn is not None))


FAMILIES: Mapping[str, Callable[[str, Keys], ModelSpec]] = MappingProxyType(
    {
        "Qwen3MoeForCausalLM": _qwen3_moe,
        "Qwen3ForCausalLM": _qwen3,
    }
)
"""Architecture -> how its config.json is read. A further family is a further row."""

_MODEL_TYPES = MappingProxyType({"qwen3_moe": "Qwen3MoeForCausalLM", "qwen3": "Qwen3ForCausalLM"})
"""Used when config.json names no architecture."""


def _architecture(config: Keys) -> str:
    names = config.get("architectures")
    known = f"known: {', '.join(FAMILIES)}"
    if names is None:
        model_type = config.get("model_type")
        if isinstance(model_type, str) and model_type in _MODEL_TYPES:
            return _MODEL_TYPES[model_type]
        raise ConfigError(f"config.json: architectures is missing and model_type is {show(model_type)}; {known}")
    if isinstance(names, list):
        for name in names:
            if isinstance(name, str) and name in FAMILIES:
                return name
    raise ConfigError(f"config.json: architectures {show(names)} is not supported; {known}")


def _decoder(architecture: str, config: Keys, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise wrong("hidden_act", activation, "must be silu")
    return ModelSpec(
        architecture=architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden=integer(config, "hidden_size"),
        norm_eps=number(config, "rms_norm_eps", low=0.0, high=1.0, default=1e-6),
        max_position=integer(config, "max_position_embeddings"),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        checkpoint_dtype=checkpoint_dtype(config) or "float32",
        layers=layers,
    )


def _gqa(config: Keys, default_head_dim: int | None) -> GqaSpec:
    _refuse_windows(config)
    heads = integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", default=heads if "num_key_value_heads" in config else None)
    if heads % kv_heads:
        raise wrong("num_key_value_heads", kv_heads, f"must divide num_attention_heads ({heads})")
    hidden = integer(config, "hidden_size")
    if default_head_dim is None and config.get("head_dim") is None and hidden % heads:
        raise wrong("hidden_size", hidden, f"is no multiple of num_attention_heads ({heads}): state head_dim")
    head_dim = integer(config, "head_dim", high=65536, default=default_head_dim or max(1, hidden // heads))
    if head_dim % 2:
        raise wrong("head_dim", head_dim, "must be even for rotary embeddings")
    bias = flag(config, "attention_bias")
    return GqaSpec(heads, kv_heads, head_dim, bias, True, _rope(config, head_dim), o_bias=bias)


def _refuse_windows(config: Keys) -> None:
    if flag(config, "use_sliding_window"):
        raise wrong("use_sliding_window", True, "sliding window attention is not supported; set it to false")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise wrong("layer_types", kinds, "only full_attention layers are supported")


def _moe(config: Keys, experts: int) -> MoeSpec:
    per_token = integer(config, "num_experts_per_tok")
    if per_token > experts:
        raise wrong("num_experts_per_tok", per_token, f"must be at most the number of experts ({experts})")
    return MoeSpec(experts, per_token, integer(config, "moe_intermediate_size"), flag(config, "norm_topk_prob"))


# Rotary embedding ---------------------------------------------------------------------------------------------------


def _rope(config: Keys, head_dim: int) -> RopeSpec:
    """From `rope_parameters`, or `rope_theta` and `rope_scaling`; defaults as in transformers' modeling_rope_utils."""
    old, new = nested(config, "rope_scaling"), nested(config, "rope_parameters")
    rope = {**new, **old}
    kind = old.get("rope_type") or old.get("type") or new.get("rope_type") or new.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise wrong("rope_type", kind, f"is not supported; known: {', '.join(ROPE_KINDS)}")
    for key, neutral in (("partial_rotary_factor", 1), ("mrope_section", None)):
        value = config.get(key) if rope.get(key) is None else rope[key]
        if value is not None and value != neutral:
            raise wrong(key, value, "is not supported; remove it")
    return _scaled_rope(kind, _theta(config, rope), rope, config, head_dim)


def _theta(config: Keys, rope: Keys) -> float:
    outer = number(config, "rope_theta", low=1.0, default=0.0)
    inner = number(rope, "rope_theta", low=1.0, default=0.0)
    if outer and inner and outer != inner:
        raise wrong("rope_theta", outer, f"contradicts rope_parameters.rope_theta ({inner}): state one of them")
    return outer or inner or 10000.0


def _scaled_rope(kind: str, theta: float, rope: Keys, config: Keys, head_dim: int) -> RopeSpec:
    max_position = integer(config, "max_position_embeddings")
    original = integer(rope, "original_max_position_embeddings", default=max_position)
    original = integer(config, "original_max_position_embeddings", default=original)
    match kind:
        case "linear":
            return RopeSpec(theta, kind, number(rope, "factor", low=1.0))
        case "dynamic":
            if head_dim < 4:
                raise wrong("head_dim", head_dim, "must be at least 4 for the dynamic rope type")
            return RopeSpec(theta, kind, number(rope, "factor", low=1.0), max_position)
        case "yarn":
            return _yarn(theta, rope, max_position, original)
        case "llama3":
            low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
            if not 0.0 < low < high:
                raise wrong("low_freq_factor", low, f"must be above 0 and below high_freq_factor ({high})")
            factor = number(rope, "factor", low=1.0)
            return RopeSpec(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        case _:
            return RopeSpec(theta)


def _yarn(theta: float, rope: Keys, max_position: int, original: int) -> RopeSpec:
    fast, slow = number(rope, "beta_fast", default=32.0) or 32.0, number(rope, "beta_slow", default=1.0) or 1.0
    if fast < slow:
        raise wrong("beta_fast", fast, f"must be at least beta_slow ({slow})")
    return RopeSpec(
        theta,
        "yarn",
        number(rope, "factor", low=1.0, default=max(1.0, max_position / original)),
        original,
        attention_factor=None if rope.get("attention_factor") is None else number(rope, "attention_factor"),
        beta_fast=fast,
        beta_slow=slow,
        mscale=None if rope.get("mscale") is None else number(rope, "mscale"),
        mscale_all_dim=None if rope.get("mscale_all_dim") is None else number(rope, "mscale_all_dim"),
        truncate=flag(rope, "truncate", default=True),
    )
