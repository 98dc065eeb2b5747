"""Quantised experts: records against what kernels.quant made and safetensors' own writer wrote, and damaged files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copyengine.checkpoint.model import expert_file_nbytes, open_model
from copyengine.checkpoint.reader import read_experts
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from kernels.quant import Nvfp4, dequant
from tests.copyengine.checkpoint.quantised_files import DIALECTS, QUANTISATION, SIZES, DialectName, Made

EXPERT = "model.layers.2.mlp.experts.3"
SUFFIXES: dict[DialectName, tuple[str, str, str]] = {  # codes, scales, global
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
}


@pytest.fixture(params=DIALECTS)
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Made:
    return Made(tmp_path, request.param)


def read_records(directory: Path) -> list[np.ndarray]:
    """[L] of [E, record_nbytes], which held no numbers before."""
    model = open_model(directory)
    record, moe = record_layout(model.spec, "bfloat16"), model.spec.moe
    assert record is not None and moe is not None and record.format == "nvfp4"
    banks = [np.full((moe.experts, record.record_nbytes), 0xFF, np.uint8) for _ in model.spec.moe_layers]
    heard: list[int] = []
    assert read_experts(model, record, banks, heard.append) == expert_file_nbytes(model) == sum(heard)
    return banks


def linears_of(banks: list[np.ndarray]) -> dict[str, Nvfp4]:
    """Each linear as it lies in the records, cut by hand: H 32, I 16."""
    found = {}
    for layer, bank in zip((0, 2), banks, strict=True):
        for expert, record in enumerate(bank):
            raw = torch.from_numpy(record)
            stem = f"model.layers.{layer}.mlp.experts.{expert}"
            scales = raw.view(torch.float8_e4m3fn)
            factors = raw.view(torch.float32)
            # fields start at 0, 512, 640, 768, 1024 and 1152
            found[f"{stem}.gate_proj"] = Nvfp4(raw[:256].view(16, 16), scales[512:544].view(16, 2), factors[160])
            found[f"{stem}.up_proj"] = Nvfp4(raw[256:512].view(16, 16), scales[544:576].view(16, 2), factors[161])
            found[f"{stem}.down_proj"] = Nvfp4(raw[768:1024].view(32, 8), scales[1024:1056].view(32, 1), factors[288])
    return found


def assert_same_linears(directory: Path, expected: dict[str, Nvfp4]) -> None:
    found = linears_of(read_records(directory))
    assert found.keys() == expected.keys() and len(found) == 2 * SIZES.experts * 3
    for name, matrix in found.items():
        for ours, theirs in zip(matrix, expected[name], strict=True):
            assert ours.flatten().view(torch.uint8).tolist() == theirs.flatten().view(torch.uint8).tolist(), name
        assert torch.equal(dequant(matrix), dequant(expected[name]))


def refused(made: Made, *words: str) -> None:
    directory = made.write()
    with pytest.raises(ConfigError) as caught:
        read_records(directory)
    for word in words:
        assert word in str(caught.value), caught.value


def test_records_hold_what_was_quantised(made: Made) -> None:
    assert_same_linears(made.write(), made.linears)


def test_the_parts_of_a_linear_may_lie_in_different_shards(made: Made) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for i, (name, tensor) in enumerate(reversed(made.tensors.items())):
        shards[i % 3][name] = tensor
    assert_same_linears(made.write(*shards), made.linears)


def test_scales_of_activations_and_empty_tensors_change_nothing(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    suffix = "input_scale" if made.dialect == "modelopt" else "input_global_scale"
    for stem in made.linears:
        made.tensors[f"{stem}.{suffix}"] = torch.tensor([float("nan")])
    made.tensors["model.layers.0.self_attn.q_proj.weight_scale"] = torch.empty(0)
    made.tensors["nothing"] = torch.empty(0, 4)
    assert_same_linears(made.write(), made.linears)
    assert " tensors=32 input_scales=30" in caplog.text


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_global_is_a_scalar_or_one_element(made: Made, shape: tuple[int, ...]) -> None:
    suffix = SUFFIXES[made.dialect][2]
    for stem in made.linears:
        made.tensors[f"{stem}.{suffix}"] = made.tensors[f"{stem}.{suffix}"].reshape(shape)
    assert_same_linears(made.write(), made.linears)


@pytest.mark.parametrize("linear", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_missing_tensor_of_one_expert(made: Made, linear: str, part: int) -> None:
    name = f"{EXPERT}.{linear}.{SUFFIXES[made.dialect][part]}"
    del made.tensors[name]
    refused(made, f"tensor {name} is missing", "expert 3 of layer 2")


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf")])
def test_a_global_that_scales_no_weights(made: Made, value: float) -> None:
    name = f"{EXPERT}.up_proj.{SUFFIXES[made.dialect][2]}"
    made.tensors[name] = torch.full_like(made.tensors[name], value)
    refused(made, name, f"is {value:g}")


@pytest.mark.parametrize("share", [0.999, 1.001])
def test_a_global_under_which_weights_are_beyond_float32(made: Made, share: float) -> None:
    """With the largest scale and code, 448 and 6. The largest global that is none is read, and makes numbers."""
    name, factor = f"{EXPERT}.up_proj.{SUFFIXES[made.dialect][2]}", share * torch.finfo(torch.float32).max / (448 * 6)
    made.tensors[name] = torch.full_like(made.tensors[name], factor if made.dialect == "modelopt" else 1 / factor)
    if share > 1:
        refused(made, name, "within float32")
        return
    matrices = linears_of(read_records(made.write()))
    assert all(dequant(matrix).isfinite().all() for matrix in matrices.values())


def test_a_reciprocal_that_float32_does_not_hold(tmp_path: Path) -> None:
    made = Made(tmp_path, "compressed-tensors")
    made.tensors[f"{EXPERT}.up_proj.weight_global_scale"] = torch.tensor([1e-39])
    refused(made, f"{EXPERT}.up_proj.weight_global_scale", "1e-39")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_scale_that_is_no_number(made: Made, code: int) -> None:
    name = f"{EXPERT}.down_proj.weight_scale"
    made.tensors[name].view(torch.uint8)[31, 0] = code
    refused(made, name, "NaN")


@pytest.mark.parametrize("part", [0, 1, 2])
def test_other_shapes_and_element_types(made: Made, part: int) -> None:
    name = f"{EXPERT}.down_proj.{SUFFIXES[made.dialect][part]}"
    right = made.tensors[name]
    made.tensors[name] = right.to(torch.bfloat16)
    refused(made, name, "BF16", ("U8", "F8_E4M3", "F32")[part])
    made.root = made.root / "again"
    made.root.mkdir()
    made.tensors[name] = torch.ones(2, 3).to(right.dtype)
    refused(made, name, "[2, 3]")


def test_config_and_files_of_different_schemes(made: Made) -> None:
    other = DIALECTS[1 - DIALECTS.index(made.dialect)]
    made.config["quantization_config"] = QUANTISATION[other]
    codes = SUFFIXES[made.dialect][0]
    refused(made, f"experts.0.gate_proj.{codes}", "config.json says", other.split("-")[0][:5])


def test_files_that_are_not_quantised_as_config_says(made: Made) -> None:
    (made.source / "config.json").write_text(json.dumps(made.config))
    with pytest.raises(ConfigError, match=r"experts\.0\.gate_proj\.weight.*BF16.*config\.json"):
        open_model(made.source)


def test_files_that_are_quantised_where_config_does_not_say_so(made: Made) -> None:
    del made.config["quantization_config"]
    refused(made, "experts.0.gate_proj.weight is quantised", "quantization_config")


def test_sizes_that_the_format_cannot_have(made: Made) -> None:
    made.config["moe_intermediate_size"] = 24
    refused(made, "nvfp4", "16", "24")


def test_weights_packed_by_compressed_tensors_in_both_spellings_of_the_format(tmp_path: Path) -> None:
    """The format stated for each group instead of for all, and activations quantised too."""
    made = Made(tmp_path, "compressed-tensors")
    stated: dict[str, Any] = {**QUANTISATION["compressed-tensors"]}
    group = {**stated["config_groups"]["group_0"], "format": stated["format"], "input_activations": {"num_bits": 4}}
    made.config["quantization_config"] = {**stated, "format": "mixed-precision", "config_groups": {"group_0": group}}
    assert_same_linears(made.write(), made.linears)
