"""parse_spec: against configs in both spellings that must mean the same, and against junk of every kind."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copyengine.families import parse_spec
from copyengine.model_spec import DenseSpec, ModelSpec, MoeSpec, RopeSpec
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from kernels.formats import ExpertFormat
from tests.gqa_layers import gqa_of

HUB: dict[str, Any] = {  # Qwen3-30B-A3B's config.json
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DENSE = {**HUB, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0, "original_max_position_embeddings": 8192}

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
FLASH_NEXT = {**HUB, "hidden_size": 2560, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640}
FLASH_NEXT |= {"num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320}
"""The geometry of Qwen3.8-Flash-Next's experts and attention heads, as a Qwen3-MoE."""


def mixed(experts: str = "NVFP4", second: str = "NVFP4") -> dict[str, Any]:
    """A MIXED_PRECISION quantization_config whose two experts are `experts` and `second`."""
    layers = {"model.layers.0.self_attn.q_proj": "FP8", "model.layers.0.mlp.experts.0.up_proj": experts}
    layers["model.layers.0.mlp.experts.1.up_proj"] = second
    named = {name: {"quant_algo": algorithm} for name, algorithm in layers.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": named}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def moe_of(spec: ModelSpec) -> MoeSpec:
    assert spec.moe is not None
    return spec.moe


def test_a_hub_config() -> None:
    spec = parse_spec(HUB)
    assert (len(spec.layers), spec.hidden, spec.vocab_size, spec.max_position) == (48, 2048, 151936, 40960)
    assert moe_of(spec) == MoeSpec(128, 8, 768, True)
    attention = gqa_of(spec.layers[0])
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.qk_norm) == (32, 4, 128, True)
    assert not attention.qkv_bias and not attention.o_bias and not spec.tie_word_embeddings
    assert (attention.rope, spec.norm_eps, spec.checkpoint_dtype) == (RopeSpec(1e6), 1e-6, "bfloat16")


def test_both_spellings_mean_the_same() -> None:
    new = without(HUB, "num_experts", "rope_theta", "rope_scaling", "torch_dtype")
    new |= {"num_local_experts": 128, "dtype": "bfloat16"}
    new["rope_parameters"] = {"rope_theta": 1000000.0, "rope_type": "default"}
    assert parse_spec(new) == parse_spec(HUB)
    new["rope_parameters"] = {"rope_theta": 1000000.0, **YARN}
    old = {**HUB, "rope_scaling": {"type": "yarn", **without(YARN, "rope_type")}}
    assert parse_spec(new) == parse_spec(old)
    assert parse_spec({**HUB, "torch_dtype": "torch.bfloat16"}) == parse_spec(HUB)
    assert parse_spec(without(HUB, "architectures")) == parse_spec(HUB)


@pytest.mark.parametrize(
    "quantisation",
    [
        MODELOPT,
        {**MODELOPT, "group_size": 16, "ignore": ["lm_head"], "kv_cache_scheme": None},
        {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        mixed(),
    ],
)
def test_forms_of_nvfp4(quantisation: dict[str, Any]) -> None:
    """Against the same model without it: only the format of the experts differs."""
    spec = parse_spec({**FLASH_NEXT, "quantization_config": quantisation})
    assert spec.expert_format.name == "nvfp4" and parse_spec(FLASH_NEXT).expert_format == ExpertFormat()
    assert msgspec.structs.replace(spec, expert_format=ExpertFormat()) == parse_spec(FLASH_NEXT)
    assert parse_spec({**FLASH_NEXT, "quantization_config": None}) == parse_spec(FLASH_NEXT)


SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
}


def test_mixtral() -> None:
    """Its expert size, its key for E, and weights that sum to 1 whatever is stated; a window that cuts is refused."""
    config = {**SMALL, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "sliding_window": None}
    spec = parse_spec(config)
    assert [layer.ffn for layer in spec.layers] == [MoeSpec(8, 2, 96, True)] * 2
    attention = gqa_of(spec.layers[0])
    assert (attention.head_dim, attention.qk_norm, attention.qkv_bias, spec.norm_eps) == (16, False, False, 1e-5)
    assert parse_spec(config | {"norm_topk_prob": False, "sliding_window": 512}) == spec
    assert [gqa_of(layer).window for layer in parse_spec(config | {"sliding_window": 511}).layers] == [511, 511]
    with pytest.raises(ConfigError, match="sliding_window is 0"):
        parse_spec(config | {"sliding_window": 0})


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("architecture", "change", "windows"),
    [
        ("Qwen3MoeForCausalLM", {"use_sliding_window": False}, [None] * 4),
        ("Qwen3MoeForCausalLM", {"max_window_layers": 2}, [100] * 4),
        ("Qwen3MoeForCausalLM", {"layer_types": [SLIDING] * 4}, [100] * 4),
        ("Qwen3MoeForCausalLM", {"sliding_window": None}, [None] * 4),
        ("Qwen3MoeForCausalLM", {"sliding_window": 512}, [None] * 4),
        ("Qwen3ForCausalLM", {"max_window_layers": 3}, [None, None, None, 100]),
        ("Qwen3ForCausalLM", {"max_window_layers": None}, [None] * 4),
        ("Qwen3ForCausalLM", {"layer_types": [SLIDING, FULL, FULL, SLIDING]}, [100, None, None, 100]),
        ("Qwen2MoeForCausalLM", {"max_window_layers": 2}, [100, None, None, None]),
        ("Qwen2MoeForCausalLM", {}, [100, None, 100, None]),
        ("Qwen2MoeForCausalLM", {"layer_types": [FULL, SLIDING, FULL, FULL]}, [None, 100, None, None]),
        ("MixtralForCausalLM", {"use_sliding_window": None}, [100] * 4),
        ("OlmoeForCausalLM", {"use_sliding_window": False}, [None] * 4),
    ],
)
def test_which_layers_have_windows(architecture: str, change: dict[str, Any], windows: list[int | None]) -> None:
    """Against what the configuration and modelling files of transformers 5.24 make of it, read off by hand."""
    config = {**SMALL, "architectures": [architecture], "num_experts": 8, "moe_intermediate_size": 32}
    config |= {"num_hidden_layers": 4, "shared_expert_intermediate_size": 48}
    config |= {"use_sliding_window": True, "sliding_window": 100} | change
    assert [gqa_of(layer).window for layer in parse_spec(config).layers] == windows


def test_olmoe() -> None:
    config = {**SMALL, "architectures": ["OlmoeForCausalLM"], "num_experts": 8, "clip_qkv": None}
    spec = parse_spec(config)
    attention = gqa_of(spec.layers[0])
    assert moe_of(spec) == MoeSpec(8, 2, 96, False)
    assert (attention.qk_norm, attention.wide_qk_norm, attention.clip_qkv) == (True, True, None)
    assert gqa_of(parse_spec(config | {"clip_qkv": 8.0}).layers[0]).clip_qkv == 8.0
    with pytest.raises(ConfigError, match="clip_qkv"):
        parse_spec(config | {"clip_qkv": "much"})


def test_qwen2_moe() -> None:
    """A shared expert beside the routed ones, in sparse layers; biases on q, k and v unless they are turned off."""
    config = {**SMALL, "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 32}
    config |= {"shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}
    spec = parse_spec(config)
    assert [layer.ffn for layer in spec.layers] == [DenseSpec(96), MoeSpec(8, 2, 32, False, 48)]
    attention = gqa_of(spec.layers[1])
    assert (attention.qkv_bias, attention.o_bias, attention.qk_norm) == (True, False, False)
    assert not gqa_of(parse_spec(config | {"qkv_bias": False}).layers[1]).qkv_bias
    with pytest.raises(ConfigError, match="shared_expert_intermediate_size is missing"):
        parse_spec(without(config, "shared_expert_intermediate_size"))


GPT_OSS: dict[str, Any] = {  # gpt-oss-20b's config.json
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


def test_gpt_oss() -> None:
    """As on the hub; what transformers' GptOssConfig takes where nothing is stated; what is refused."""
    spec = parse_spec(GPT_OSS)
    assert moe_of(spec) == MoeSpec(32, 4, 2880, True, router_bias=True, softmax_chosen=True)
    assert spec.expert_format == ExpertFormat("mxfp4", bias=True, swiglu_limit=7.0)
    assert [gqa_of(layer).window for layer in spec.layers] == [128, None] * 12
    attention = gqa_of(spec.layers[0])
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.sinks) == (64, 8, 64, True)
    assert (attention.qkv_bias, attention.o_bias, attention.qk_norm, spec.norm_eps) == (True, True, False, 1e-5)
    assert attention.rope == RopeSpec(150000.0, "yarn", 32.0, 4096, truncate=False)
    plain = without(GPT_OSS, "quantization_config")
    assert parse_spec(plain).expert_format == ExpertFormat(bias=True, swiglu_limit=7.0)
    unsaid = ("attention_bias", "head_dim", "layer_types", "rope_scaling", "rope_theta", "sliding_window")
    bare = without(GPT_OSS, *unsaid, "swiglu_limit", "max_position_embeddings", "rms_norm_eps", "hidden_act")
    assert parse_spec(bare) == spec
    everywhere = parse_spec(GPT_OSS | {"layer_types": ["full_attention"] * 24})
    assert {gqa_of(layer).window for layer in everywhere.layers} == {None}
    for change, word in (
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"sliding_window": None}, "sliding_window"),
        ({"intermediate_size": 2872}, "multiples of 32"),
    ):
        with pytest.raises(ConfigError, match=word):
            record_layout(parse_spec(GPT_OSS | change), "bfloat16")


def test_the_geometry_of_flash_next() -> None:
    spec = parse_spec(FLASH_NEXT)
    assert (len(spec.moe_layers), spec.hidden, moe_of(spec)) == (48, 2560, MoeSpec(512, 10, 640, True))
    attention = gqa_of(spec.layers[47])
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (24, 2, 256)


@pytest.mark.parametrize("experts", [0, 1, 8])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("only", [[], [0], [1, 4], [99]])
def test_which_layers_are_sparse(experts: int, step: int, only: list[int]) -> None:
    """Against the condition in transformers' Qwen3MoeDecoderLayer, spelt out."""
    config = {**HUB, "num_hidden_layers": 5, "num_experts": experts, "num_experts_per_tok": 1}
    spec = parse_spec({**config, "decoder_sparse_step": step, "mlp_only_layers": only})
    for i, layer in enumerate(spec.layers):
        if i not in only and (experts > 0 and (i + 1) % step == 0):
            assert isinstance(layer.ffn, MoeSpec) and i in spec.moe_layers
        else:
            assert layer.ffn == DenseSpec(6144) and i not in spec.moe_layers


def test_the_dense_family() -> None:
    spec = parse_spec(without(DENSE, "head_dim", "num_experts"))
    assert spec.moe is None and spec.moe_layers == ()
    assert gqa_of(spec.layers[47]).head_dim == 128  # Qwen3Config's default
    assert gqa_of(parse_spec({**DENSE, "num_key_value_heads": None}).layers[0]).kv_heads == 32
    assert gqa_of(parse_spec({**DENSE, "attention_bias": True}).layers[0]).o_bias


def test_head_dim_of_the_moe_family_is_derived() -> None:
    assert gqa_of(parse_spec(without(HUB, "head_dim")).layers[0]).head_dim == 64


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"type": "default"}, RopeSpec(1e6)),
        ({"type": "linear", "factor": 2}, RopeSpec(1e6, "linear", 2.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, RopeSpec(1e6, "dynamic", 2.0, 40960)),
        (YARN, RopeSpec(1e6, "yarn", 4.0, 32768)),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 10240},
            RopeSpec(1e6, "yarn", 4.0, 10240),
        ),
        (
            {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
            RopeSpec(1e6, "yarn", 4.0, 32768, None, 16.0, 2.0, 0.7, 1.0, False),
        ),
        ({**YARN, "attention_factor": 1.5}, RopeSpec(1e6, "yarn", 4.0, 32768, 1.5)),
        (
            {"rope_type": "llama3", **LLAMA3},
            RopeSpec(1e6, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
    ],
)
def test_rope_kinds(scaling: dict[str, Any], rope: RopeSpec) -> None:
    assert gqa_of(parse_spec({**HUB, "rope_scaling": scaling}).layers[0]).rope == rope
    nested = {**without(HUB, "rope_theta"), "rope_parameters": {**scaling, "rope_theta": 1e6}}
    assert gqa_of(parse_spec(nested).layers[0]).rope == rope


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": []}, ["architectures", "Qwen3MoeForCausalLM"]),
        ({"architectures": None, "model_type": "llama"}, ["llama", "Qwen3MoeForCausalLM"]),
        ({"num_experts_per_tok": 129}, ["num_experts_per_tok", "129", "128"]),
        ({"num_experts_per_tok": 0}, ["num_experts_per_tok", "0"]),
        ({"num_experts_per_tok": None}, ["num_experts_per_tok", "missing"]),
        ({"num_experts": -1}, ["num_experts", "-1"]),
        ({"num_experts": 8.0}, ["num_experts", "8.0"]),
        ({"num_experts": True}, ["num_experts", "True"]),
        ({"num_local_experts": 60}, ["num_local_experts", "60", "128"]),
        ({"hidden_size": "2048"}, ["hidden_size", "'2048'", "integer"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000"]),
        ({"num_hidden_layers": 10**5000}, ["num_hidden_layers", "huge"]),
        ({"num_key_value_heads": 5}, ["num_key_value_heads", "5", "32"]),
        ({"head_dim": 127}, ["head_dim", "127", "even"]),
        ({"head_dim": None, "hidden_size": 2049}, ["hidden_size", "2049", "head_dim"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"use_sliding_window": True, "sliding_window": 0}, ["sliding_window", "0"]),
        (
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"] * 48},
            ["layer_types", "contradicts", "9"],
        ),
        ({"architectures": ["OlmoeForCausalLM"], "use_sliding_window": True}, ["use_sliding_window", "false"]),
        ({"architectures": ["Qwen3NextForCausalLM"], "use_sliding_window": True}, ["use_sliding_window", "false"]),
        ({**DENSE, "layer_types": ["sliding_attention"] * 48}, ["layer_types", "sliding_window"]),
        ({**DENSE, "layer_types": ["full_attention"] * 47}, ["layer_types", "47", "48"]),
        ({"layer_types": ["linear_attention"] * 48}, ["layer_types", "linear_attention", "sliding_attention"]),
        ({"use_sliding_window": 1}, ["use_sliding_window", "1"]),
        ({"layer_types": ["sliding_attention"] * 48}, ["layer_types", "sliding_attention"]),
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step", "0"]),
        ({"mlp_only_layers": ["a"]}, ["mlp_only_layers", "'a'"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn", "bfloat16"]),
        ({"dtype": "float16"}, ["bfloat16", "float16", "contradicts"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"quantization_config": "NVFP4"}, ["quantization_config", "'NVFP4'"]),
        ({"quantization_config": {}}, ["quantization_config", "None"]),
        ({"quantization_config": {**MODELOPT, "quant_algo": "INT8_SQ"}}, ["modelopt", "'INT8_SQ'"]),
        ({"quantization_config": {**MODELOPT, "group_size": 32}}, ["group_size", "32", "16"]),
        ({"quantization_config": {**MODELOPT, "quant_algo": "MIXED_PRECISION"}}, ["quantization_config", "modelopt"]),
        ({"quantization_config": mixed(experts="FP8")}, ["'FP8'"]),
        ({"quantization_config": mixed("W4A8_AWQ", "W4A8_AWQ")}, ["'W4A8_AWQ'"]),
        ({"quantization_config": mixed(second="FP8")}, ["'NVFP4'", "'FP8'"]),
        ({"rope_theta": 0}, ["rope_theta", "0"]),
        ({"rope_theta": 1}, ["rope_theta", "1", "above 1"]),
        ({"rope_theta": float("inf")}, ["rope_theta", "inf"]),
        ({"rope_scaling": {**YARN, "factor": float("nan")}}, ["factor", "nan"]),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, ["original_max_position_embeddings", "0"]),
        ({"rope_scaling": {**YARN, "beta_slow": 5e-324}}, ["beta_slow", "5e-324"]),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, ["beta_fast", "0"]),
        ({"rope_parameters": {"rope_theta": 5.0}}, ["rope_theta", "1000000.0", "5.0"]),
        ({"rope_scaling": {"type": "longrope"}}, ["rope_type", "longrope", "yarn"]),
        ({"rope_scaling": {"rope_type": [1]}}, ["rope_type", "[1]"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "yarn", "object"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor", "missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, ["beta_fast", "beta_slow"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, ["low_freq_factor", "4.0"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, ["head_dim", "2"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ],
)
def test_refusals_name_the_key_the_value_and_the_fix(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec({**HUB, **change})
    for word in words:
        assert word in str(caught.value)


REQUIRED = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
REQUIRED += ["max_position_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size"]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        parse_spec(without(HUB, key))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = sorted(
    {
        *HUB,
        "dtype",
        "num_local_experts",
        "quantization_config",
        "rope_parameters",
        "layer_types",
        "original_max_position_embeddings",
    }
)
ROPE_KEYS = sorted(
    {"type", "rope_theta", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", *YARN, *LLAMA3}
)
ROPE_JUNK = st.dictionaries(
    st.sampled_from(ROPE_KEYS),
    JUNK | st.sampled_from(["linear", "dynamic", "yarn", "llama3"]) | st.floats(0, 1e30) | st.integers(0, 100),
    max_size=6,
)


@settings(max_examples=400)
@given(
    base=st.sampled_from([HUB, DENSE, {}]),
    change=st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=4),
    rope=st.none() | ROPE_JUNK,
)
def test_junk_gives_a_spec_or_a_refusal(base: dict[str, Any], change: dict[str, Any], rope: Any) -> None:
    config = {**copy.deepcopy(base), **change}
    if rope is not None:
        config["rope_scaling"] = rope
    try:
        spec = parse_spec(config)
    except ConfigError as error:
        assert str(error)
        return
    assert spec.layers and all(gqa_of(layer).heads % gqa_of(layer).kv_heads == 0 for layer in spec.layers)
    assert spec.moe is None or 1 <= spec.moe.experts_per_token <= spec.moe.experts
