"""quantisation: against quantization_configs as ModelOpt, compressed-tensors and others write them, and changed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from copyengine.checkpoint.directory import read_config
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.checkpoint.schemes import (
    COMPRESSED_FP8,
    COMPRESSED_FP8_CHANNEL,
    COMPRESSED_MXFP4,
    COMPRESSED_TENSORS,
    FP8,
    MODELOPT,
    MODELOPT_FP8,
    Scheme,
    compressed_fp8_block,
    fp8_block,
)
from copyengine.families import parse_spec
from copyengine.families.quantisation import quantisation
from copyengine.wire.errors import ConfigError
from kernels.formats import ExpertFormat

PACKED: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "dynamic": False,
                "group_size": 16,
                "num_bits": 4,
                "observer": "minmax",
                "strategy": "tensor_group",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
EXPORTED = {
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"group_size": 16, "num_bits": 4, "type": "float"}}
    },
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}


def changed(**change: Any) -> dict[str, Any]:
    """PACKED with other keys, at the top or among those of the weights."""
    config = copy.deepcopy(PACKED)
    for key, value in change.items():
        (config if key in config else config["config_groups"]["group_0"]["weights"])[key] = value
    return config


EXPERT = "model.layers.1.mlp.experts.7.down_proj"
ATTENTION = "model.layers.1.self_attn.q_proj"
PREFIXES = ("model.", "model.language_model.", "language_model.model.")


def scheme_of(config: Any, name: str = EXPERT) -> Scheme | None:
    found = quantisation({"quantization_config": config})
    assert found is not None
    return found.scheme_of(name)


def test_who_wrote_it_says_how_it_is_spelt() -> None:
    assert scheme_of(EXPORTED) is MODELOPT
    assert scheme_of({**EXPORTED, "quant_algo": "FP8"}) is MODELOPT_FP8
    assert scheme_of(PACKED) is COMPRESSED_TENSORS
    assert scheme_of({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]}) == fp8_block(128, 64)
    assert scheme_of({"quant_method": "fp8", "activation_scheme": "static"}) is FP8
    assert quantisation({}) is None and quantisation({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("change", "scheme"),
    [
        ({"format": "mxfp4-pack-quantized", "strategy": "group", "group_size": 32}, COMPRESSED_MXFP4),
        ({"format": "float-quantized", "num_bits": 8, "strategy": "tensor"}, COMPRESSED_FP8),
        ({"format": "float-quantized", "num_bits": 8, "strategy": "channel"}, COMPRESSED_FP8_CHANNEL),
        (
            {"format": "float-quantized", "num_bits": 8, "strategy": "block", "block_structure": [128, 64]},
            compressed_fp8_block(128, 64),
        ),
    ],
)
def test_formats_of_compressed_tensors(change: dict[str, Any], scheme: Scheme) -> None:
    assert scheme_of(changed(**change)) == scheme


def test_a_group_may_state_the_format_itself() -> None:
    config = changed(format="mixed-precision")
    config["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"
    assert scheme_of(config) is COMPRESSED_TENSORS


def test_groups_of_different_targets() -> None:
    """A group of named linears counts before that of all, whatever their order."""
    config = changed()
    fp8 = {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    config["config_groups"]["group_1"] = {**fp8, "targets": ["re:.*self_attn.*", "model.layers.9"]}
    assert scheme_of(config) is COMPRESSED_TENSORS
    for name in (ATTENTION, "model.layers.9.mlp.up_proj"):
        assert scheme_of(config, name) is COMPRESSED_FP8_CHANNEL
    assert scheme_of(config, "lm_head") is None and scheme_of(config, "model.layers.0.mlp.gate") is None


@pytest.mark.parametrize("key", ["ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    "pattern",
    ["model.layers.1.mlp.experts", "mlp.experts", "*mlp.experts*", "model.layers.1*", r"re:.*experts\.\d+\.d", EXPERT],
)
def test_what_is_left_out_is_not_quantised_under_any_prefix(key: str, pattern: str) -> None:
    for prefix in PREFIXES:
        config = {"quant_method": "fp8", key: [pattern]}
        assert scheme_of(config, EXPERT.replace("model.", prefix, 1)) is None
        assert scheme_of(config, "model.layers.0.mlp.gate_proj".replace("model.", prefix, 1)) is FP8


@pytest.mark.parametrize("pattern", ["model.layers.1.mlp.gate", "experts", "lm_head", "re:experts", "model.layers.11*"])
def test_names_that_only_begin_alike_are_quantised(pattern: str) -> None:
    config = {"quant_method": "fp8", "modules_to_not_convert": [pattern]}
    assert scheme_of(config, "model.layers.1.mlp.gate_proj") is FP8


def test_mixed_precision_says_it_of_each_linear() -> None:
    layers = {ATTENTION: {"quant_algo": "FP8"}, EXPERT: {"quant_algo": "NVFP4"}, "lm_head": {"quant_algo": "W4A8_AWQ"}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert scheme_of(config) is MODELOPT and scheme_of(config, EXPERT.replace("7", "8")) is MODELOPT
    assert scheme_of(config, ATTENTION) is MODELOPT_FP8 and scheme_of(config, "lm_head") is None


def test_experts_have_one_format() -> None:
    """Against specs: all left out, and one projection or layer of another scheme than the others."""
    block: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = model_config(Sizes())
    assert parse_spec({**config, "quantization_config": block}).expert_format == ExpertFormat("fp8_block", (128, 128))
    left_out = {**block, "modules_to_not_convert": ["mlp.experts"]}
    assert parse_spec({**config, "quantization_config": left_out}).expert_format == ExpertFormat()
    groups = changed()
    groups["config_groups"]["group_1"] = {
        "format": "float-quantized",
        "targets": ["re:.*layers.3.*down_proj"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
    with pytest.raises(ConfigError, match=r"NVFP4.*layers\.3\.mlp\.experts\.0\.down_proj as .*FP8"):
        parse_spec({**config, "quantization_config": groups})


def test_modelopt_s_own_file_says_the_same_or_is_refused(tmp_path: Path) -> None:
    """Alone, beside a config.json that says the same in its own words, and beside one that does not."""
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    write = (tmp_path / "config.json").write_text
    write("{}")
    found = quantisation(read_config(tmp_path))
    assert found is not None and found.scheme_of(EXPERT) is MODELOPT and found.scheme_of("lm_head") is None
    write(json.dumps({"quantization_config": EXPORTED}))
    assert quantisation(read_config(tmp_path)) == found
    assert quantisation(read_config(tmp_path, '{"quantization_config": null}')) is None
    for other in ({**EXPORTED, "ignore": []}, {**EXPORTED, "quant_algo": "FP8"}, PACKED):
        write(json.dumps({"quantization_config": other}))
        with pytest.raises(ConfigError, match=r"config\.json: quantization_config and hf_quant_config\.json"):
            quantisation(read_config(tmp_path))


def test_modelopt_s_own_file_may_list_what_is_left_out_in_another_order(tmp_path: Path) -> None:
    """Against itself: names, wildcards and regular expressions, one of them twice."""
    left_out = ["lm_head", "*gate", "*.layers.0.*", "re:.*vision.*", "re:.*mtp.*"]
    for names in (left_out, [*reversed(left_out), "*gate"]):
        own = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": names}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**EXPORTED, "ignore": left_out}}))
        found = quantisation(read_config(tmp_path))
        assert found is not None and found.scheme_of("model.layers.1.mlp.gate") is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed(format="int-quantized"), ["compressed-tensors", "group_0", "'int-quantized'"]),
        (changed(format="float-quantized"), ["float-quantized", "group_0", "num_bits", "4", "8"]),
        (changed(format="float-quantized", num_bits=8), ["group_0", "strategy", "'tensor_group'", "'channel'"]),
        (changed(format="float-quantized", num_bits=8, strategy="block"), ["group_0", "block_structure", "None"]),
        (changed(format="mxfp4-pack-quantized"), ["mxfp4-pack-quantized", "group_0", "strategy", "'tensor_group'"]),
        (changed(ignore=["re:("]), ["ignore", "re:(", "regular expression"]),
        (changed(ignore=["re:a{99999999999}"]), ["ignore", "re:a{99999999999}", "regular expression"]),
        (changed(ignore=["re:" + "(" * 5000]), ["ignore", "regular expression"]),
        (changed(ignore="lm_head"), ["ignore", "'lm_head'", "list"]),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["'fp8'", "'e5m2'"]),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, ["'modelopt'", "'FP8_PB_WO'"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size", "[128]", "two"]),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, ["weight_block_size", "[0, 128]", "two"]),
        (changed(format=None), ["group_0", "None"]),
        (changed(config_groups={}), ["config_groups"]),
        (changed(config_groups=[1]), ["config_groups", "object"]),
        (changed(config_groups={"group_1": 3}), ["group_1", "object"]),
        (changed(config_groups={"group_1": {}}), ["group_1", "num_bits", "None"]),
        (changed(num_bits=8), ["num_bits", "8", "4"]),
        (changed(type="int"), ["type", "'int'", "'float'"]),
        (changed(strategy="group"), ["strategy", "'group'", "'tensor_group'"]),
        (changed(group_size=32), ["group_size", "32", "16"]),
        ({**EXPORTED, "quant_method": "gptq"}, ["'gptq'", "ModelOpt", "compressed-tensors"]),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        quantisation({"quantization_config": config})
    for word in ["config.json", *words]:
        assert word in str(caught.value)
