"""config.json -> what families of decoders share: the sizes of the whole, the layer kinds, the element type."""

from collections.abc import Sequence

from copyengine.checkpoint.keys import Keys, flag, integer, integers, number, stated, wrong
from copyengine.families.rope import rope
from copyengine.model_spec import DenseSpec, GatedDeltaSpec, GqaSpec, LayerSpec, ModelSpec, MoeSpec

DTYPES = ("bfloat16", "float16", "float32")
"""Element types a checkpoint may have."""

MAX_LAYERS = 4096
"""Beyond these a config.json is taken for damaged: the largest models have some hundred, and each is an object."""

MAX_EXPERTS = 65536
"""Beyond these a config.json is taken for damaged."""


def decoder(architecture: str, config: Keys, layers: tuple[LayerSpec, ...], norm_eps: float = 1e-6) -> ModelSpec:
    """A model of `layers`; its own sizes are read from `config`, which may leave out `norm_eps`."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise wrong("hidden_act", activation, "must be silu")
    return ModelSpec(
        architecture=architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden=integer(config, "hidden_size"),
        norm_eps=number(config, "rms_norm_eps", low=0.0, high=1.0, default=norm_eps),
        max_position=integer(config, "max_position_embeddings"),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        checkpoint_dtype=checkpoint_dtype(config) or "float32",
        layers=layers,
    )


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


def layer_count(config: Keys) -> int:
    """How many layers there are."""
    return integer(config, "num_hidden_layers", high=MAX_LAYERS)


def expert_count(config: Keys) -> int:
    """E, in either spelling; 0 for none."""
    return integer(config, "num_experts", "num_local_experts", low=0, high=MAX_EXPERTS)


def gqa(config: Keys, default_head_dim: int | None, qk_norm: bool) -> GqaSpec:
    """Attention over the whole context, with biases on all projections if `attention_bias` says so.

    Without `head_dim` and a default it is H over the heads.
    """
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
    return GqaSpec(heads, kv_heads, head_dim, bias, qk_norm, rope(config, head_dim), o_bias=bias)


def moe(config: Keys, experts: int, size_key: str = "moe_intermediate_size") -> MoeSpec:
    """A routed mixture over `experts`, of the intermediate size under `size_key`."""
    per_token = integer(config, "num_experts_per_tok")
    if per_token > experts:
        raise wrong("num_experts_per_tok", per_token, f"must be at most the number of experts ({experts})")
    return MoeSpec(experts, per_token, integer(config, size_key), flag(config, "norm_topk_prob"))


def sparse_layers(config: Keys, count: int, experts: int) -> list[bool]:
    """Which layers have experts, as the decoder layers of Qwen's families in transformers decide it."""
    step = integer(config, "decoder_sparse_step", default=1)
    dense_layers = set(integers(config, "mlp_only_layers"))
    return [i not in dense_layers and experts > 0 and (i + 1) % step == 0 for i in range(count)]


def mixed_layers(
    config: Keys, attentions: Sequence[GqaSpec | GatedDeltaSpec], sparse: Sequence[bool], routed: MoeSpec | None
) -> tuple[LayerSpec, ...]:
    """Layers of these attentions, with experts where `sparse` says so and a dense MLP elsewhere."""
    dense = None if all(sparse) else DenseSpec(integer(config, "intermediate_size"))
    ffns = [routed if is_sparse else dense for is_sparse in sparse]
    return tuple(LayerSpec(attention, ffn) for attention, ffn in zip(attentions, ffns, strict=True) if ffn is not None)
