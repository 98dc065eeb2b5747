"""The tensors of a ModelSpec outside the experts, by canonical name: layer kind by layer kind, whatever the family.

A further layer kind is a further case. How a checkpoint spells them is `copyengine.checkpoint.names`.
"""

from collections.abc import Iterator

from copyengine.model_spec import DenseSpec, GatedDeltaSpec, GqaSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec

Shape = tuple[int, ...]

FLOAT32 = ("score_router", "score_bias")
"""Tensors of a layer that stay float32 whatever the model's type: a sigmoid's scores are near to each other, and their
biases may be larger than what tells them apart."""


def dtype_of(name: str, dtype: str) -> str:
    """The element type of the tensor of that canonical name in a model of `dtype`."""
    return "float32" if stays_float32(name) else dtype


def stays_float32(name: str) -> bool:
    """Whether the tensor of that canonical name is one of FLOAT32."""
    return name.rpartition(".")[2] in FLOAT32


def dense_tensors(spec: ModelSpec) -> Iterator[tuple[str, int | None, Shape]]:
    """Every tensor but the experts: (canonical name, in which {i} stands for the layer, that layer, shape)."""
    yield "embed", None, (spec.vocab_size, spec.hidden)
    for i, layer in enumerate(spec.layers):
        yield from (("layers.{i}." + name, i, shape) for name, shape in _layer_tensors(layer, spec.hidden))
    yield "final_norm", None, (spec.hidden,)
    if not spec.tie_word_embeddings:
        yield "head", None, (spec.vocab_size, spec.hidden)


def _layer_tensors(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield "input_norm", (hidden,)
    yield from _attention_tensors(layer.attention, hidden)
    yield "ffn_norm", (hidden,)
    match layer.ffn:
        case MoeSpec(experts=experts, shared_intermediate=shared) as moe:
            yield "score_router" if moe.grouped else "router", (experts, hidden)
            if moe.grouped:
                yield "score_bias", (experts,)
            if moe.router_bias:
                yield "router_bias", (experts,)
            if shared:
                yield from _mlp_tensors("shared", shared, hidden)
            if shared and moe.shared_gate:
                yield "shared_gate", (1, hidden)
        case DenseSpec(intermediate=intermediate):
            yield from _mlp_tensors("ffn", intermediate, hidden)


def _mlp_tensors(name: str, intermediate: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.gate", (intermediate, hidden)
    yield f"{name}.up", (intermediate, hidden)
    yield f"{name}.down", (hidden, intermediate)


def _attention_tensors(spec: GqaSpec | GatedDeltaSpec | MlaSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    match spec:
        case GqaSpec():
            yield from _gqa_tensors(spec, hidden)
        case GatedDeltaSpec():
            yield from _gated_delta_tensors(spec, hidden)
        case MlaSpec():
            yield from _mla_tensors(spec, hidden)


def _gated_delta_tensors(spec: GatedDeltaSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """z is the gate of the output; b and a give how much of a token goes in and how much of the state stays."""
    value_rows = spec.v_heads * spec.v_dim
    if spec.grouped:
        yield "delta.qkvz", (spec.conv_channels + value_rows, hidden)
        yield "delta.ba", (2 * spec.v_heads, hidden)
    else:
        yield "delta.qkv", (spec.conv_channels, hidden)
        yield "delta.z", (value_rows, hidden)
        yield "delta.b", (spec.v_heads, hidden)
        yield "delta.a", (spec.v_heads, hidden)
    yield "delta.conv", (spec.conv_channels, 1, spec.conv_width)
    yield "delta.a_log", (spec.v_heads,)
    yield "delta.dt_bias", (spec.v_heads,)
    yield "delta.gated_norm", (spec.v_dim,)
    yield "delta.o", (hidden, value_rows)


def _gqa_tensors(spec: GqaSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for part, rows in (("q", q_rows * (2 if spec.output_gate else 1)), ("k", kv_rows), ("v", kv_rows)):
        yield f"attention.{part}", (rows, hidden)
        if spec.qkv_bias:
            yield f"attention.{part}_bias", (rows,)
    yield "attention.o", (hidden, q_rows)
    if spec.o_bias:
        yield "attention.o_bias", (hidden,)
    if spec.sinks:
        yield "attention.sinks", (spec.heads,)
    if spec.qk_norm:
        yield "attention.q_norm", (q_rows if spec.wide_qk_norm else spec.head_dim,)
        yield "attention.k_norm", (kv_rows if spec.wide_qk_norm else spec.head_dim,)


def _mla_tensors(spec: MlaSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """q straight from x, or down to a latent ("q_a") and up from it ("q_b"); k and v likewise."""
    q_rows = spec.heads * (spec.nope_dim + spec.rope_dim)
    if spec.q_rank:
        yield "attention.q_a", (spec.q_rank, hidden)
        if spec.bias:
            yield "attention.q_a_bias", (spec.q_rank,)
        yield "attention.q_a_norm", (spec.q_rank,)
        yield "attention.q_b", (q_rows, spec.q_rank)
    else:
        yield "attention.q", (q_rows, hidden)
    yield "attention.kv_a", (spec.rank + spec.rope_dim, hidden)
    if spec.bias:
        yield "attention.kv_a_bias", (spec.rank + spec.rope_dim,)
    yield "attention.kv_a_norm", (spec.rank,)
    yield "attention.kv_b", (spec.heads * (spec.nope_dim + spec.value_dim), spec.rank)
    yield "attention.o", (hidden, spec.heads * spec.value_dim)
    if spec.bias:
        yield "attention.o_bias", (hidden,)
