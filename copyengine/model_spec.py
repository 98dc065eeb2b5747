"""What a model is made of, without its weights and without torch.

A layer is a composition of kinds: `LayerSpec.attention` and `LayerSpec.ffn` are tagged unions, so that a further kind
is a further Struct. Nothing here assumes that all layers are alike. `copyengine.families` makes them of a config.json.
"""

import math

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


class AttentionSpec(Struct, frozen=True):
    """What all kinds of attention have."""

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """What a sequence has for all its tokens together, in float32: nothing, but for kinds with recurrent state."""
        return ()

    @property
    def state_nbytes(self) -> int:
        """Of that, for one sequence."""
        return 4 * sum(math.prod(shape) for shape in self.state_shapes)


class GqaSpec(AttentionSpec, frozen=True, tag="gqa"):
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
    rotary_dim: int = 0  # leading elements of a head that are rotated; 0: all
    output_gate: bool = False  # q's projection gives each head a gate too, whose sigmoid scales the head's output

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """What each token leaves in the KV pages: (heads, width) of every tensor, here of keys and of values."""
        return ((self.kv_heads, self.head_dim),) * 2


class GatedDeltaSpec(AttentionSpec, frozen=True, tag="gated_delta"):
    """Gated DeltaNet (Yang et al., 2412.06464): a recurrent state in place of keys and values.

    q, k and v pass a causal depthwise convolution of `conv_width` tokens and SiLU; each key head serves `v_heads` over
    `k_heads` consecutive value heads.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    grouped: bool = False  # the checkpoint keeps q, k, v and z of a key head together in one projection

    @property
    def conv_channels(self) -> int:
        """Of q, k and v together."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """What each token leaves in the KV pages: nothing."""
        return ()

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """What a sequence has for all its tokens together, in float32: the last rows that the convolution needs again,
        and the recurrent state."""
        return ((self.conv_width - 1, self.conv_channels), (self.v_heads, self.k_dim, self.v_dim))


class MlaSpec(AttentionSpec, frozen=True, tag="mla"):
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1): keys and values of all heads are made of one
    normalised latent per token, and beside it of one rotated key part; only those two are kept."""

    heads: int
    rank: int  # of the latent: kv_lora_rank
    nope_dim: int  # of a head's q and k without position: qk_nope_head_dim
    rope_dim: int  # of a head's q and of the one k that are rotated: qk_rope_head_dim
    value_dim: int  # of a head's v: v_head_dim
    scale: float  # of the scores before the softmax, with YaRN's part in it
    rope: RopeSpec
    q_rank: int = 0  # q_lora_rank: q is made of a normalised latent of its own; 0: straight from x
    bias: bool = False  # of the projections of both latents and of the output
    interleaved: bool = True  # rotated pairs are neighbours in the projections' rows, not halves

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """What each token leaves in the KV pages, once for all heads: the latent and the rotated key part."""
        return ((1, self.rank), (1, self.rope_dim))


class DenseSpec(Struct, frozen=True, tag="dense"):
    """A gated SiLU MLP of intermediate size `intermediate`."""

    intermediate: int


class GroupedRouting(Struct, frozen=True):
    """Routing by sigmoids, in float32: the K experts of the largest score + bias, out of the `groups_per_token` groups
    whose two largest such sums add up to most; weighted by the score alone (DeepSeek-V3, 2412.19437, section 2.1.2)."""

    groups: int = 1  # of neighbouring experts, equally many in each
    groups_per_token: int = 1
    scale: float = 1.0  # of the weights, after they are renormalised


class MoeSpec(Struct, frozen=True, tag="moe"):
    """A routed mixture: softmax over E, top-K, renormalised over the K if `norm_topk_prob`; or with `softmax_chosen`
    the K largest logits and a softmax over these alone; or as `grouped` says.

    Beside it every token may go through a shared expert, a gated SiLU MLP that is kept with the dense weights; what it
    gives may be scaled by the sigmoid of a gate.
    """

    experts: int  # E
    experts_per_token: int  # K
    intermediate: int  # I
    norm_topk_prob: bool
    shared_intermediate: int = 0  # of the shared expert; 0: there is none
    router_bias: bool = False
    softmax_chosen: bool = False
    shared_gate: bool = True
    grouped: GroupedRouting | None = None


class LayerSpec(Struct, frozen=True):
    """One decoder layer. Exactly the layers whose ffn is a MoeSpec have a bank; their order numbers the banks."""

    attention: GqaSpec | GatedDeltaSpec | MlaSpec
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
    zero_centred_norms: bool = False  # norms of H and of heads scale by 1 + weight

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
