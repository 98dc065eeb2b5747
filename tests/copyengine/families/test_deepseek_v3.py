"""config.json of DeepSeek-V3 and its like -> ModelSpec: against the published models, and what is refused."""

import math
from typing import Any

import pytest

from copyengine.budget import kv_token_nbytes
from copyengine.families import parse_spec
from copyengine.model_spec import DenseSpec, GroupedRouting, MlaSpec, MoeSpec, RopeSpec
from copyengine.wire.errors import ConfigError

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""The hub's config.json of deepseek-ai/DeepSeek-V3, without its quantization_config."""

KIMI_K2 = DEEPSEEK_V3 | {
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
}

ROUTED = MoeSpec(256, 8, 2048, True, 2048, shared_gate=False, grouped=GroupedRouting(8, 4, 2.5))


def test_the_hub_s_config() -> None:
    """Against the published geometry: 58 layers of 256 experts, 671 billion parameters in all, 70 kB of KV a token."""
    spec = parse_spec(DEEPSEEK_V3)
    rope = RopeSpec(1e4, "yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    scale = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
    assert spec.layers[60].attention == MlaSpec(128, 512, 128, 64, 128, scale, rope, 1536)
    assert spec.moe == ROUTED
    assert [layer.ffn for layer in spec.layers[:3]] == [DenseSpec(18432)] * 3 and len(spec.moe_layers) == 58
    assert kv_token_nbytes(spec, "bfloat16") == 61 * (512 + 64) * 2


def test_kimi_k2_has_one_group() -> None:
    spec = parse_spec(KIMI_K2)
    assert spec.moe and spec.moe.grouped == GroupedRouting(1, 1, 2.827) and len(spec.moe_layers) == 60


def test_what_transformers_leaves_out_or_calls_otherwise() -> None:
    """Against DeepseekV3Config's defaults and its attribute_map."""
    left_out = ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "n_shared_experts", "rope_scaling")
    config = {key: value for key, value in DEEPSEEK_V3.items() if key not in left_out}
    config["num_local_experts"] = config.pop("n_routed_experts")
    spec = parse_spec(config | {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True})
    assert spec.moe == ROUTED
    expected = MlaSpec(128, 512, 128, 64, 128, 192**-0.5, RopeSpec(1e4), bias=True, interleaved=False)
    assert spec.layers[0].attention == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 8}, ["num_key_value_heads is 8", "128"]),
        ({"qk_rope_head_dim": 63}, ["qk_rope_head_dim is 63", "even"]),
        ({"kv_lora_rank": None}, ["kv_lora_rank is missing"]),
        ({"scoring_func": "softmax"}, ["scoring_func is 'softmax'", "sigmoid"]),
        ({"topk_method": "greedy"}, ["topk_method is 'greedy'", "noaux_tc"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq is 2"]),
        ({"n_group": 7}, ["n_group is 7", "256"]),
        ({"n_group": 256}, ["n_group is 256", "two at least"]),
        ({"topk_group": 9}, ["topk_group is 9", "n_group (8)"]),
        ({"num_experts_per_tok": 129}, ["num_experts_per_tok is 129", "4 of 8 groups"]),
        ({"q_lora_rank": 0}, ["q_lora_rank is 0"]),
        ({"rope_scaling": {"type": "su", "factor": 2}}, ["rope_type is 'su'"]),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(change: dict[str, Any], words: list[str]) -> None:
    """Against the messages' words."""
    with pytest.raises(ConfigError) as refused:
        parse_spec(DEEPSEEK_V3 | change)
    assert all(word in str(refused.value) for word in words), refused.value
