"""How checkpoint files spell the tensors of a ModelSpec.

A `Dialect` says what stands before the layers' names and where the head is; the tables below say how one layer's
tensors are called. Prefixes and spellings of further families are further rows.
"""

from collections.abc import Container, Iterator

from msgspec import Struct

from copyengine.model_spec import DenseSpec, GqaSpec, LayerSpec, ModelSpec, MoeSpec

Shape = tuple[int, ...]


class Dialect(Struct, frozen=True):
    """The top-level names of a checkpoint."""

    prefix: str  # before "layers.{i}."
    head: str


DIALECTS = (Dialect("model.", "lm_head.weight"),)


class DenseName(Struct, frozen=True):
    """One tensor that is kept whole: its canonical name, its name in the files, its shape."""

    name: str
    source: str
    shape: Shape


class ExpertName(Struct, frozen=True):
    """One run of rows of one record field: of expert `expert`, or of every expert (a fused tensor) if that is None.

    The tensor fills the rows of `field` from `first_row` on. A fused tensor has a leading dimension E.
    """

    bank: int
    expert: int | None
    field: str  # of kernels.formats: "gate_up" or "down"
    first_row: int
    source: str
    shape: Shape


def dialect_of(sources: Container[str]) -> Dialect:
    """The dialect of a checkpoint with these tensor names; the first one if none fits, for the message's sake."""
    return next((d for d in DIALECTS if f"{d.prefix}embed_tokens.weight" in sources), DIALECTS[0])


def dense_names(spec: ModelSpec, dialect: Dialect = DIALECTS[0]) -> Iterator[DenseName]:
    """Every tensor of `spec` but the experts."""
    yield DenseName("embed", f"{dialect.prefix}embed_tokens.weight", (spec.vocab_size, spec.hidden))
    for i, layer in enumerate(spec.layers):
        for name, source, shape in _layer_names(layer, spec.hidden):
            yield DenseName(f"layers.{i}.{name}", f"{dialect.prefix}layers.{i}.{source}", shape)
    yield DenseName("final_norm", f"{dialect.prefix}norm.weight", (spec.hidden,))
    if not spec.tie_word_embeddings:
        yield DenseName("head", dialect.head, (spec.vocab_size, spec.hidden))


def expert_names(spec: ModelSpec, dialect: Dialect, sources: Container[str]) -> Iterator[ExpertName]:
    """Every expert tensor of `spec`, bank by bank; fused where `sources` has the fused spelling."""
    for bank, i in enumerate(spec.moe_layers):
        moe = spec.layers[i].ffn
        assert isinstance(moe, MoeSpec)
        prefix = f"{dialect.prefix}layers.{i}.mlp.experts."
        fused = f"{prefix}gate_up_proj" in sources
        yield from (_fused_experts if fused else _single_experts)(bank, prefix, moe, spec.hidden)


def _layer_names(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, str, Shape]]:
    yield "input_norm", "input_layernorm.weight", (hidden,)
    yield from _attention_names(layer.attention, hidden)
    yield "ffn_norm", "post_attention_layernorm.weight", (hidden,)
    match layer.ffn:
        case MoeSpec(experts=experts):
            yield "router", "mlp.gate.weight", (experts, hidden)
        case DenseSpec(intermediate=intermediate):
            yield "ffn.gate", "mlp.gate_proj.weight", (intermediate, hidden)
            yield "ffn.up", "mlp.up_proj.weight", (intermediate, hidden)
            yield "ffn.down", "mlp.down_proj.weight", (hidden, intermediate)


def _attention_names(spec: GqaSpec, hidden: int) -> Iterator[tuple[str, str, Shape]]:
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        yield f"attention.{part}", f"self_attn.{part}_proj.weight", (rows, hidden)
        if spec.qkv_bias:
            yield f"attention.{part}_bias", f"self_attn.{part}_proj.bias", (rows,)
    yield "attention.o", "self_attn.o_proj.weight", (hidden, q_rows)
    if spec.o_bias:
        yield "attention.o_bias", "self_attn.o_proj.bias", (hidden,)
    if spec.qk_norm:
        yield "attention.q_norm", "self_attn.q_norm.weight", (spec.head_dim,)
        yield "attention.k_norm", "self_attn.k_norm.weight", (spec.head_dim,)


def _single_experts(bank: int, prefix: str, moe: MoeSpec, hidden: int) -> Iterator[ExpertName]:
    rows, columns = (moe.intermediate, hidden), (hidden, moe.intermediate)
    for e in range(moe.experts):
        yield ExpertName(bank, e, "gate_up", 0, f"{prefix}{e}.gate_proj.weight", rows)
        yield ExpertName(bank, e, "gate_up", moe.intermediate, f"{prefix}{e}.up_proj.weight", rows)
        yield ExpertName(bank, e, "down", 0, f"{prefix}{e}.down_proj.weight", columns)


def _fused_experts(bank: int, prefix: str, moe: MoeSpec, hidden: int) -> Iterator[ExpertName]:
    gate_up, down = (moe.experts, 2 * moe.intermediate, hidden), (moe.experts, hidden, moe.intermediate)
    yield ExpertName(bank, None, "gate_up", 0, f"{prefix}gate_up_proj", gate_up)
    yield ExpertName(bank, None, "down", 0, f"{prefix}down_proj", down)
