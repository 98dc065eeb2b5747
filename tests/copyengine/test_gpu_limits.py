"""The limits of a GPU against those that the kernels' packages state, and what is refused, on both sides of each."""

import pytest

from copyengine import gpu_limits
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.families import parse_spec
from copyengine.gpu_limits import check_model, check_slots
from copyengine.wire.errors import ConfigError
from copyengine.workspace import DELTA_PIECE_ROWS
from kernels import causal_conv, gated_delta, moe_align, norm, sampling, state_pieces, topk_route
from kernels.admit import device as admit
from kernels.attention import cost as attention
from kernels.latent_attention import cost as latent_attention
from tests.copyengine.families.test_deepseek_v3 import DEEPSEEK_V3


def test_the_limits_are_the_kernels_own() -> None:
    assert gpu_limits.MAX_SLOTS == admit.MAX_SLOTS
    for experts in (admit.MAX_EXPERTS, moe_align.MAX_EXPERTS_ON_DEVICE, topk_route.MAX_EXPERTS_ON_DEVICE):
        assert experts == gpu_limits.MAX_EXPERTS
    assert gpu_limits.MAX_EXPERTS_PER_TOKEN == topk_route.MAX_K_ON_DEVICE
    assert gpu_limits.MAX_VOCAB == sampling.MAX_VOCAB_ON_DEVICE
    assert gpu_limits.MAX_HIDDEN == norm.MAX_WIDTH_ON_DEVICE
    assert gpu_limits.MAX_HEAD_DIM == attention.MAX_HEAD_DIM
    assert gpu_limits.MAX_HEADS_PER_KV_HEAD == attention.MAX_GROUP
    assert gpu_limits.MAX_LATENT_RANK == latent_attention.MAX_RANK
    assert gpu_limits.MAX_LATENT_ROPE == latent_attention.MAX_ROPE
    assert gpu_limits.MAX_DELTA_DIM == gated_delta.MAX_DIM
    assert gpu_limits.MAX_CONV_WIDTH == causal_conv.MAX_WIDTH
    assert DELTA_PIECE_ROWS == state_pieces.PIECE_ROWS


@pytest.mark.parametrize(
    ("field", "limit", "step"),
    [
        ("num_experts", 4096, 1),
        ("num_experts_per_tok", 32, 1),
        ("vocab_size", 1_048_576, 1),
        ("hidden_size", 16_384, 1),
        ("head_dim", 256, 2),
        ("num_attention_heads", 32, 1),
    ],
)
def test_both_sides_of_each_limit(field: str, limit: int, step: int) -> None:
    sizes = Sizes(layers=2, hidden=8, intermediate=4, heads=2, kv_heads=1, head_dim=4, experts=64, vocab_size=10)
    for size in (limit - step, limit):
        check_model(parse_spec(model_config(sizes) | {field: size}))
    with pytest.raises(ConfigError, match=rf"{limit + step:,}.*{limit:,}.*--device cpu"):
        check_model(parse_spec(model_config(sizes) | {field: limit + step}))


@pytest.mark.parametrize(("field", "limit"), [("kv_lora_rank", 512), ("qk_rope_head_dim", 64)])
def test_both_sides_of_each_limit_of_latent_attention(field: str, limit: int) -> None:
    """With more heads than one kv head may have."""
    check_model(parse_spec(DEEPSEEK_V3 | {field: limit}))
    with pytest.raises(ConfigError, match=rf"{field}: {limit + 2}, .*{limit}.*--device cpu"):
        check_model(parse_spec(DEEPSEEK_V3 | {field: limit + 2}))


@pytest.mark.parametrize(
    ("field", "limit"),
    [("linear_key_head_dim", 128), ("linear_value_head_dim", 128), ("linear_conv_kernel_dim", 8)],
)
def test_both_sides_of_each_limit_of_gated_deltanet(field: str, limit: int) -> None:
    config = model_config(Sizes(layers=4, hidden=8, intermediate=4, experts=8, vocab_size=10))
    config |= {"architectures": ["Qwen3NextForCausalLM"], "shared_expert_intermediate_size": 4}
    check_model(parse_spec(config | {field: limit}))
    with pytest.raises(ConfigError, match=rf"{field}: {limit + 1:,}.*{limit:,}.*--device cpu"):
        check_model(parse_spec(config | {field: limit + 1}))


def test_a_dense_model_has_no_experts_to_check() -> None:
    check_model(parse_spec(model_config(Sizes(experts=0))))


def test_both_sides_of_the_most_slots() -> None:
    for slots in (0, 1, 32_767, 32_768):
        check_slots(slots, 40_000)
    check_slots(32_769, 32_768)
    with pytest.raises(ConfigError, match=r"--slots 32769 .*32768"):
        check_slots(32_769, 32_769)
