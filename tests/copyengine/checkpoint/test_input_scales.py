"""W4A4: the layers' input scales against the largest of those that were written, and files that lack one."""

from typing import Any

import msgspec
import pytest
import torch

from copyengine.checkpoint import input_scales
from copyengine.checkpoint.input_scales import MADE_UP, made_up_scales, read_input_scales
from copyengine.checkpoint.model import Model, expert_file_nbytes, open_model
from copyengine.checkpoint.reader import read_experts
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from tests.copyengine.checkpoint.quantised_files import DIALECTS, QUANTISATION, SIZES, Made
from tests.copyengine.checkpoint.test_quantised import read_records

EXPERT = "model.layers.2.mlp.experts.3"
SUFFIX = {"modelopt": "input_scale", "compressed-tensors": "input_global_scale"}


def with_scales(made: Made) -> dict[str, torch.Tensor]:
    """Gives every linear of an expert a scale of its own; what each stands for, by the linear's name."""
    generator = torch.Generator().manual_seed(0)
    meant = {}
    for number, stem in enumerate(sorted(made.linears)):
        scale = torch.rand((), generator=generator) + 0.01
        stored = scale if made.dialect == "modelopt" else (1 / scale).reshape(1)
        meant[stem] = scale if made.dialect == "modelopt" else 1 / stored[0]
        shape = (1,) if number % 2 else stored.shape
        made.tensors[f"{stem}.{SUFFIX[made.dialect]}"] = stored.reshape(shape)
    return meant


@pytest.fixture(params=DIALECTS)
def made(tmp_path: Any, request: pytest.FixtureRequest) -> Made:
    made = Made(tmp_path, request.param)
    if made.dialect == "compressed-tensors":
        group = {**QUANTISATION[made.dialect]["config_groups"]["group_0"], "input_activations": {"num_bits": 4}}
        made.config["quantization_config"] = {**QUANTISATION[made.dialect], "config_groups": {"group_0": group}}
    return made


def open_w4a4(made: Made) -> Model:
    return open_model(made.write(), expert_activations="w4a4")


def refused(made: Made, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_input_scales(open_w4a4(made), lambda _: None)
    for word in words:
        assert word in str(caught.value), caught.value


def test_a_layer_s_scales_are_the_largest_of_its_experts(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gate and up of all experts, and of down of all, as float32 numbers; the records are those of weights alone."""
    monkeypatch.setattr(input_scales, "BATCH", 4)
    meant = with_scales(made)
    model = open_w4a4(made)
    heard: list[int] = []
    expected = []
    for layer in (0, 2):
        of_layer = {stem: float(scale) for stem, scale in meant.items() if stem.startswith(f"model.layers.{layer}.")}
        assert len(of_layer) == 3 * SIZES.experts
        down = [scale for stem, scale in of_layer.items() if stem.endswith("down_proj")]
        others = [scale for stem, scale in of_layer.items() if not stem.endswith("down_proj")]
        expected.append((max(others), max(down)))
    assert read_input_scales(model, heard.append) == expected
    record = record_layout(model.spec, "bfloat16")
    assert record is not None and record.kind.quantised_inputs
    plain = read_records(model.directory)
    banks = [bank.copy() for bank in plain]
    for bank in banks:
        bank[:] = 0xFF
    read_experts(model, record, banks, heard.append)
    assert all((ours == theirs).all() for ours, theirs in zip(banks, plain, strict=True))
    assert sum(heard) == expert_file_nbytes(model) == expert_file_nbytes(open_model(model.directory)) + 4 * len(meant)


@pytest.mark.parametrize("linear", ["up_proj", "down_proj"])
def test_a_missing_scale_of_one_expert(made: Made, linear: str) -> None:
    """Refused by name where activations are rounded, and nothing to weights alone."""
    with_scales(made)
    name = f"{EXPERT}.{linear}.{SUFFIX[made.dialect]}"
    del made.tensors[name]
    refused(made, f"tensor {name} is missing", "expert 3 of layer 2", "--expert-activations plain")
    assert read_input_scales(open_model(made.root / "quantised"), lambda _: None) == []


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_scales_that_are_no_scales(made: Made, value: float) -> None:
    with_scales(made)
    name = f"{EXPERT}.up_proj.{SUFFIX[made.dialect]}"
    made.tensors[name] = torch.tensor([value])
    refused(made, name, f"is {value:g}")


def test_scales_of_another_shape_or_element_type(made: Made) -> None:
    with_scales(made)
    name = f"{EXPERT}.up_proj.{SUFFIX[made.dialect]}"
    made.tensors[name] = torch.ones(2)
    refused(made, name, "[2]")
    made.root = made.root / "again"
    made.root.mkdir()
    made.tensors[name] = torch.ones(1, dtype=torch.float64)
    refused(made, name, "F64", "F32")


@pytest.mark.parametrize(
    ("quantisation", "word"),
    [
        (None, "not quantised"),
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "fp8_block"),
        (QUANTISATION["compressed-tensors"], "input_activations"),
    ],
)
def test_checkpoints_that_are_not_made_for_it(made: Made, quantisation: Any, word: str) -> None:
    made.config["quantization_config"] = quantisation
    refused(made, "--expert-activations w4a4", word, "--expert-activations plain")


def test_made_up_weights_have_made_up_scales(made: Made) -> None:
    directory = made.write()
    assert made_up_scales(open_model(directory, load_format="dummy").spec) == []
    spec = open_model(directory, load_format="dummy", expert_activations="w4a4").spec
    assert made_up_scales(spec) == [(MADE_UP, MADE_UP)] * 2
    dense = msgspec.json.encode({"num_experts": 0}).decode()
    with pytest.raises(ConfigError, match="no experts"):
        open_model(directory, dense, load_format="dummy", expert_activations="w4a4")
