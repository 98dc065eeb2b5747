"""Qwen3-Next and Qwen3.5-MoE: their config.json against the geometry that it means, and how their files are found."""

import logging
from pathlib import Path
from typing import Any

import pytest

from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.names import dense_names, dialect_of, expert_names
from copyengine.families import FAMILIES, parse_spec
from copyengine.model_spec import GatedDeltaSpec, GqaSpec, MoeSpec, RopeSpec
from copyengine.wire.errors import ConfigError

NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
"""In the spelling of files of the hub."""

_TEXT = {
    key: value for key, value in NEXT.items() if key not in ("architectures", "rope_theta", "partial_rotary_factor")
}
_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": _TEXT | {"model_type": "qwen3_5_moe_text", "norm_topk_prob": None, "rope_parameters": _ROPE},
    "tie_word_embeddings": False,
    "vision_config": {"hidden_size": 1152, "depth": 27, "num_hidden_layers": 27},
}
"""With all sizes of Qwen3-Next, so that one test says it of both."""


@pytest.mark.parametrize(("config", "grouped"), [(NEXT, True), (QWEN3_5, False)])
def test_the_geometry_of_hub_files(config: dict[str, Any], grouped: bool) -> None:
    """Three recurrent layers to one of attention; whatever the vision tower's sizes are."""
    spec = parse_spec(config)
    delta = GatedDeltaSpec(16, 32, 128, 128, 4, grouped)
    attention = GqaSpec(16, 2, 256, False, True, RopeSpec(1e7), rotary_dim=64, output_gate=True)
    assert [layer.attention for layer in spec.layers] == [delta, delta, delta, attention] * 12
    assert {layer.ffn for layer in spec.layers} == {MoeSpec(512, 10, 512, True, shared_intermediate=512)}
    assert spec.zero_centred_norms and (spec.hidden, spec.vocab_size) == (2048, 151936)
    assert delta.state_shapes == ((3, 8192), (32, 128, 128))
    assert spec.state_nbytes == 36 * 4 * (3 * 8192 + 32 * 128 * 128) and delta.kv_shapes == ()


def test_the_text_part_alone_is_that_of_the_whole() -> None:
    alone = QWEN3_5["text_config"] | {"architectures": ["Qwen3_5MoeForCausalLM"]}
    assert parse_spec(alone).layers == parse_spec(QWEN3_5).layers
    unnamed = {key: value for key, value in alone.items() if key != "architectures"}
    assert parse_spec(unnamed) == parse_spec(alone)


def test_who_says_whether_head_and_embedding_are_one() -> None:
    """config.json itself, as transformers has it of models of several parts; else its text part."""
    tied = QWEN3_5 | {"text_config": QWEN3_5["text_config"] | {"tie_word_embeddings": True}}
    assert not parse_spec(tied).tie_word_embeddings
    assert parse_spec(tied | {"tie_word_embeddings": None}).tie_word_embeddings


def test_which_layers_are_recurrent() -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    spec = parse_spec(NEXT | {"num_hidden_layers": 3, "layer_types": kinds, "full_attention_interval": 2})
    assert [isinstance(layer.attention, GqaSpec) for layer in spec.layers] == [True, False, False]
    spec = parse_spec(NEXT | {"num_hidden_layers": 4, "full_attention_interval": 2})
    assert [isinstance(layer.attention, GqaSpec) for layer in spec.layers] == [False, True, False, True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types .* for each of 48 layers"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types"),
        ({"layer_types": 7}, "layer_types"),
        ({"linear_num_key_heads": 3}, r"linear_num_value_heads is 32: must be a multiple of .*\(3\)"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.26, "head_dim": 50}, "partial_rotary_factor"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ({"text_config": 3, "architectures": ["Qwen3_5MoeForCausalLM"]}, "text_config"),
    ],
)
def test_what_no_model_can_be_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_spec(NEXT | change)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("fused", [True, False])
def test_the_text_part_is_found_under_each_prefix(prefix: str, fused: bool) -> None:
    """Against files that hold the embedding and the first expert there."""
    spec, dialects = parse_spec(QWEN3_5), FAMILIES["Qwen3_5MoeForConditionalGeneration"].spellings
    expert = "experts.gate_up_proj" if fused else "experts.0.gate_proj.weight"
    dialect = dialect_of(spec, dialects, {f"{prefix}embed_tokens.weight", f"{prefix}layers.0.mlp.{expert}"})
    sources = [name.source for name in dense_names(spec, dialect)]
    sources += [name.source for name in expert_names(spec, dialect)]
    head = "language_model.lm_head.weight" if prefix.startswith("language_model.") else "lm_head.weight"
    assert all(source.startswith(prefix) for source in sources if source != head)
    assert head in sources and next(expert_names(spec, dialect)).source.endswith(expert)


def test_a_vision_tower_is_left_alone_and_that_is_logged(goldens: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Against what transformers saves of a whole model."""
    with caplog.at_level(logging.INFO):
        model = open_model(goldens / "qwen3_5_moe")
    assert "event=tensors_unused" in caplog.text
    assert not any("visual" in name for name in model.dense)
