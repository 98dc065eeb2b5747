"""What a model is made of, without its weights and without torch.

A layer is a composition of kinds: `LayerSpec.attention` and `LayerSpec.ffn` are tagged unions, so that a further kind
is a further Struct. Nothing here assumes that all layers are alike. `copyengine.families` makes them of a config.json.
"""

from msgspec import Struct

from kernels.formats import ExpertFormat


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
    """Grouped-query attention with rotary, and before it q/k norm: of each head, or of all heads together
    (`wide_qk_norm`)."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    rope: RopeSpec
    o_bias: bool = False  # the output projection has a bias too (attention_bias of Qwen3)
    wide_qk_norm: bool = False  # with qk_norm: over all heads of a row at once
    clip_qkv: float | None = None  # q (after its norm), k and v are clamped to that
    window: int | None = None  # each token sees that many positions, its own the last of them; None: all up to its own
    sinks: bool = False  # each head has a logit that joins the denominator of its softmax

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """What each token leaves in the KV pages: (heads, width) of every tensor, here of keys and of values."""
        return ((self.kv_heads, self.head_dim),) * 2

    @property
    def state_nbytes(self) -> int:
        """What a sequence has for all its tokens together: nothing."""
        return 0


class DenseSpec(Struct, frozen=True, tag="dense"):
    """A gated SiLU MLP of intermediate size `intermediate`."""

    intermediate: int


class MoeSpec(Struct, frozen=True, tag="moe"):
    """A routed mixture: softmax over E, top-K, renormalised over the K if `norm_topk_prob`.

    Beside it every token may go through a shared expert, a gated SiLU MLP that is kept with the dense weights; what it
    gives is scaled by the sigmoid of a gate.
    """

    experts: int  # E
    experts_per_token: int  # K
    intermediate: int  # I
    norm_topk_prob: bool
    shared_intermediate: int = 0  # of the shared expert; 0: there is none


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
    expert_format: ExpertFormat = ExpertFormat()

    @property
    def state_nbytes(self) -> int:
        """Bytes of one sequence's recurrent state over all layers; 0 if there is none."""
        return sum(layer.attention.state_nbytes for layer in self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a bank; bank number l belongs to layer moe_layers[l]."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))

    @property
    def moe(self) -> MoeSpec | None:
        """The MoE geometry, which all MoE layers of a model share; None for a dense model."""
        return next((layer.ffn for layer in self.layers if isinstance(layer.ffn, MoeSpec)), None)
