"""What the kernels can take on a GPU, to refuse a model before anything is started: pure, and without torch.

Each number is a kernel package's own, which this module may not import; tests/copyengine/test_gpu_limits.py holds them
together.
"""

from collections.abc import Iterator

from copyengine.model_spec import GatedDeltaSpec, GqaSpec, MlaSpec, ModelSpec
from copyengine.wire.errors import ConfigError

MAX_SLOTS = 32_768
"""S, of kernels.admit."""

MAX_EXPERTS = 4_096
"""E, of kernels.admit, kernels.moe_align and kernels.topk_route."""

MAX_EXPERTS_PER_TOKEN = 32
"""K, of kernels.topk_route."""

MAX_VOCAB = 1_048_576
"""V, of kernels.sampling."""

MAX_HIDDEN = 16_384
"""H, of kernels.norm."""

MAX_HEAD_DIM = 256
"""D, of kernels.attention."""

MAX_HEADS_PER_KV_HEAD = 32
"""Of kernels.attention."""

MAX_LATENT_RANK = 512
"""R, of kernels.latent_attention."""

MAX_LATENT_ROPE = 64
"""P, of kernels.latent_attention."""

MAX_DELTA_DIM = 128
"""Dk and Dv, of kernels.gated_delta."""

MAX_CONV_WIDTH = 8
"""W, of kernels.causal_conv."""


def check_model(spec: ModelSpec) -> None:
    """ConfigError, naming both numbers, if `spec` has something of which the kernels take less."""
    sizes = {
        "vocabulary": (spec.vocab_size, MAX_VOCAB),
        "hidden size": (spec.hidden, MAX_HIDDEN),
    }
    for attention in {layer.attention for layer in spec.layers}:
        sizes |= {what: (max(size, sizes.get(what, (0, 0))[0]), most) for what, size, most in _attention(attention)}
    if spec.moe:
        sizes["experts of a layer"] = spec.moe.experts, MAX_EXPERTS
        sizes["experts per token"] = spec.moe.experts_per_token, MAX_EXPERTS_PER_TOKEN
    for what, (size, most) in sizes.items():
        if size > most:
            raise ConfigError(f"--model: its {what}: {size:,}, and a GPU takes {most:,} at most; use --device cpu")


def _attention(spec: GqaSpec | GatedDeltaSpec | MlaSpec) -> Iterator[tuple[str, int, int]]:
    """What it has, how much of it, and how much of it the kernels take."""
    match spec:
        case GqaSpec():
            yield "head_dim", spec.head_dim, MAX_HEAD_DIM
            yield "heads per kv head", spec.heads // spec.kv_heads, MAX_HEADS_PER_KV_HEAD
        case GatedDeltaSpec():
            yield "linear_key_head_dim", spec.k_dim, MAX_DELTA_DIM
            yield "linear_value_head_dim", spec.v_dim, MAX_DELTA_DIM
            yield "linear_conv_kernel_dim", spec.conv_width, MAX_CONV_WIDTH
        case MlaSpec():
            yield "kv_lora_rank", spec.rank, MAX_LATENT_RANK
            yield "qk_rope_head_dim", spec.rope_dim, MAX_LATENT_ROPE


def check_slots(slots: int, experts: int) -> None:
    """ConfigError, naming both numbers, if `slots` are too many for the kernels.

    A pool has no more than the model's `experts`, whatever was asked for.
    """
    if min(slots, experts) > MAX_SLOTS:
        raise ConfigError(
            f"--slots {slots} is more than a GPU takes, {MAX_SLOTS}: use --slots {MAX_SLOTS} or less, or --device cpu"
        )
