"""expert_scheme: against quantization_configs as ModelOpt and compressed-tensors write them, and changed ones."""

import copy
from typing import Any

import pytest

from copyengine.checkpoint.schemes import COMPRESSED_TENSORS, MODELOPT
from copyengine.families.quantisation import expert_format, expert_scheme
from copyengine.wire.errors import ConfigError

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


def test_who_wrote_it_says_how_it_is_spelt() -> None:
    assert expert_scheme({"quantization_config": EXPORTED}) is MODELOPT
    assert expert_scheme({"quantization_config": PACKED}) is COMPRESSED_TENSORS
    assert expert_scheme({}) is None and expert_format({}).name == ""
    assert expert_format({"quantization_config": PACKED}).name == "nvfp4"


def test_a_group_may_state_the_format_itself() -> None:
    config = changed(format="mixed-precision")
    config["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"
    assert expert_scheme({"quantization_config": config}) is COMPRESSED_TENSORS


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed(format="float-quantized"), ["compressed-tensors", "group_0", "'float-quantized'"]),
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
def test_what_is_not_nvfp4_is_refused_by_name(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        expert_scheme({"quantization_config": config})
    for word in ["config.json", *words]:
        assert word in str(caught.value)
