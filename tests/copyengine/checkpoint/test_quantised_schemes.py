"""Linears in every spelling: records, dense weights and damage, against kernels.quant and safetensors' own writer."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from copyengine.checkpoint import dequantise
from copyengine.checkpoint.model import Model, dense_file_nbytes, expert_file_nbytes, open_model
from copyengine.checkpoint.random_model import write_random_model
from copyengine.checkpoint.reader import read_dense, read_experts
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from kernels.formats import RecordLayout
from kernels.quant import Fp8Block, Fp8Tensor, Matrix, Mxfp4, Nvfp4, dequant
from tests.copyengine.checkpoint.quantised_files import Tensors, write_checkpoint
from tests.copyengine.checkpoint.spelt_linears import BLOCK, DENSE, SIZES, SPELLINGS, Spelling, Spelt, is_linear, spelt

EXPERT = "model.layers.2.mlp.experts.3.up_proj"
ATTENTION = "model.layers.1.self_attn.o_proj"
SMALL = msgspec.structs.replace(SIZES, experts=4)
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Made = tuple[Spelling, Spelt]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    write_random_model(directory, SMALL)
    return directory


@pytest.fixture(scope="module", params=SPELLINGS)
def kept(source: Path, request: pytest.FixtureRequest) -> Made:
    spelling = SPELLINGS[request.param]
    return spelling, spelt(source, json.loads((source / "config.json").read_text()), spelling)


@pytest.fixture
def made(kept: Made) -> Made:
    """To change: tensors may be put in the place of others, but not written into."""
    spelling, of = kept
    return spelling, of._replace(config=dict(of.config), tensors=dict(of.tensors), plain=dict(of.plain))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def fields_of(matrix: Matrix) -> tuple[torch.Tensor, ...]:
    """What a record holds of it, field by field."""
    match matrix:
        case Nvfp4(codes, scales, scale):
            return codes, scales, scale
        case Mxfp4(codes, scales) | Fp8Block(codes, scales, _) | Fp8Tensor(codes, scales):
            return codes, scales


def banks_of(model: Model) -> tuple[RecordLayout, list[np.ndarray]]:
    record, moe = record_layout(model.spec, "bfloat16"), model.spec.moe
    assert record is not None and moe is not None
    banks = [np.full((moe.experts, record.record_nbytes), 0xFF, np.uint8) for _ in model.spec.moe_layers]
    heard: list[int] = []
    assert read_experts(model, record, banks, heard.append) == expert_file_nbytes(model) == sum(heard)
    return record, banks


def dense_of(model: Model, dtype: str) -> dict[str, torch.Tensor]:
    heard: list[int] = []
    read = {name: torch.tensor(array.astype(np.float32)) for name, array in read_dense(model, dtype, heard.append)}
    assert sum(heard) == dense_file_nbytes(model)
    return read


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model = open_model(directory)
        banks_of(model)
        dense_of(model, "bfloat16")
    for word in words:
        assert word in str(caught.value), caught.value


def test_records_hold_the_bytes_that_were_made(made: Made, tmp_path: Path) -> None:
    spelling, model = made[0], open_model(write_checkpoint(tmp_path / "x", made[1].config, made[1].tensors))
    assert model.spec.expert_format.name == spelling.format
    record, banks = banks_of(model)
    fields = [[f for f in record.fields if f.name.startswith(name)] for name in ("gate_up", "down")]
    for layer, bank in zip(model.spec.moe_layers, banks, strict=True):
        for expert, data in enumerate(bank):
            stem = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up, down = (fields_of(made[1].matrices[f"{stem}.{part}_proj"]) for part in ("gate", "up", "down"))
            parts = [[as_bytes(g) + as_bytes(u) for g, u in zip(gate, up, strict=True)], list(map(as_bytes, down))]
            for of, expected in zip(fields, parts, strict=True):
                assert [data[f.offset : f.offset + f.nbytes].tobytes() for f in of] == expected


@pytest.mark.parametrize("dtype", TORCH)
def test_linears_outside_the_experts_are_rounded_once(made: Made, tmp_path: Path, dtype: str, source: Path) -> None:
    """Against the exact float64 matrices in float32, which the engine's weights are the nearest numbers to."""
    quantised = open_model(write_checkpoint(tmp_path / "x", made[1].config, made[1].tensors))
    plain = open_model(source)
    found = dense_of(quantised, dtype)
    assert found.keys() == plain.dense.keys() and quantised.dense.keys() | quantised.linears.keys() == found.keys()
    sources = {(ref.path, ref.offset): name for name, ref in plain.dense.items()}
    assert len(sources) == len(found)
    linears = {linear.source: name for name, linear in quantised.linears.items()}
    assert linears.keys() == {name for name in made[1].plain if is_linear(name) and ".experts." not in name}
    for stored, name in linears.items():
        exact = dequant(made[1].matrices[stored.removesuffix(".weight")])
        assert torch.equal(found[name], exact.float().to(TORCH[dtype]).float()), name


def test_long_matrices_are_dequantised_in_runs_of_rows(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantise, "PIECE_ELEMENTS", 300)
    directory = write_checkpoint(tmp_path / "x", made[1].config, made[1].tensors)
    found = dense_of(open_model(directory), "float32")
    assert torch.equal(found["layers.1.attention.o"], dequant(made[1].matrices[ATTENTION]).float())
    assert torch.equal(found["head"], dequant(made[1].matrices["lm_head"]).float())


def test_parts_of_linears_in_other_shards_and_tensors_of_no_use(made: Made, tmp_path: Path) -> None:
    """The same model, with empty tensors and scales of activations beside."""
    shards: list[Tensors] = [{}, {}, {}]
    for i, (name, tensor) in enumerate(reversed(made[1].tensors.items())):
        shards[i % 3][name] = tensor
    shards[0]["model.norm.weight_scale"] = torch.empty(0)
    shards[1][f"{EXPERT}.input_scale"] = torch.tensor(float("nan"))
    whole = open_model(write_checkpoint(tmp_path / "whole", made[1].config, made[1].tensors))
    parts = open_model(write_checkpoint(tmp_path / "parts", made[1].config, *shards))
    assert all(map(np.array_equal, banks_of(whole)[1], banks_of(parts)[1]))
    expected = dense_of(whole, "bfloat16")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in dense_of(parts, "bfloat16").items())


@pytest.mark.parametrize("stem", [EXPERT, ATTENTION, "lm_head"])
@pytest.mark.parametrize("part", ["codes", "scales"])
def test_one_tensor_of_one_linear_is_missing(made: Made, tmp_path: Path, stem: str, part: str) -> None:
    spelling, made_of = made
    suffix = spelling.scale if part == "scales" else "weight" + "_packed" * (f"{stem}.weight" not in made_of.tensors)
    del made_of.tensors[f"{stem}.{suffix}"]
    whose = ("expert 3 of layer 2",) if stem == EXPERT else ()
    refused(write_checkpoint(tmp_path / "x", *made_of[:2]), f"tensor {stem}.{suffix} is missing", *whose)


@pytest.mark.parametrize("stem", [EXPERT, ATTENTION])
def test_scales_and_codes_that_are_no_numbers(made: Made, tmp_path: Path, stem: str) -> None:
    """NaN in whatever spelling of it, infinity where there is one, one that makes infinity of a code, one below 0."""
    spelling, made_of = made
    name = f"{stem}.{spelling.scale}"
    good = made_of.tensors[name]
    nans = [float("nan"), float("inf"), 1e37, -0.5] if good.dtype in (torch.float32, torch.bfloat16) else [None]
    for i, value in enumerate(nans):
        made_of.tensors[name] = bad = good.clone()
        if value is None:
            bad.view(torch.uint8).view(-1)[-1] = 0xFF
        else:
            bad.view(-1)[-1] = value
        refused(write_checkpoint(tmp_path / f"x{i}", *made_of[:2]), name)
    made_of.tensors[name] = good
    codes = made_of.tensors.get(f"{stem}.weight")
    if codes is not None and codes.dtype == torch.float8_e4m3fn:
        made_of.tensors[f"{stem}.weight"] = bad = codes.clone()
        bad.view(torch.uint8)[0, 1] = 0x7F
        refused(write_checkpoint(tmp_path / "codes", *made_of[:2]), f"{stem}.weight", "NaN")


@pytest.mark.parametrize("stem", [EXPERT, ATTENTION])
def test_scales_of_another_shape_or_element_type(made: Made, tmp_path: Path, stem: str) -> None:
    spelling, made_of = made
    name = f"{stem}.{spelling.scale}"
    good = made_of.tensors[name]
    made_of.tensors[name] = torch.ones(2, 7).to(good.dtype)
    refused(write_checkpoint(tmp_path / "shape", *made_of[:2]), name, "[2, 7]")
    made_of.tensors[name] = good.to(torch.int32)
    refused(write_checkpoint(tmp_path / "dtype", *made_of[:2]), name, "I32")


def test_linears_that_are_left_out(made: Made, tmp_path: Path) -> None:
    """Where config.json leaves out the experts, or attention, they are stored unquantised and read so."""
    spelling, made_of = made
    for words, pattern in (("experts", ["re:.*mlp.experts.*"]), ("self_attn", ["*self_attn*", "re:.*self_attn.*"])):
        tensors = {name: tensor for name, tensor in made_of.tensors.items() if words not in name}
        tensors |= {name: tensor for name, tensor in made_of.plain.items() if words in name}
        config = {**made_of.config, "quantization_config": {**spelling.config, "ignore": pattern}}
        model = open_model(write_checkpoint(tmp_path / words, config, tensors))
        assert model.spec.expert_format.name == ("" if words == "experts" else spelling.format)
        assert ("layers.1.attention.o" in model.linears) == (words == "experts")
        banks_of(model)
        found = dense_of(model, "float32")["layers.1.attention.o"]
        assert torch.equal(found, made_of.plain[f"{ATTENTION}.weight"].float())


@pytest.mark.parametrize("stem", ["model.layers.0.mlp.gate", "model.embed_tokens"])
def test_routers_and_embeddings_are_never_quantised(made: Made, tmp_path: Path, stem: str) -> None:
    fields, _ = made[0].make(made[1].tensors.pop(f"{stem}.weight"))
    made[1].tensors.update({f"{stem}.{suffix}": tensor for suffix, tensor in fields.items()})
    refused(write_checkpoint(tmp_path / "x", *made[1][:2]), f"{stem}.weight is quantised", "only linears")


def test_files_that_are_quantised_where_config_does_not_say_so(made: Made, tmp_path: Path) -> None:
    del made[1].config["quantization_config"]
    refused(write_checkpoint(tmp_path / "x", *made[1][:2]), ".weight is quantised", "quantization_config")


def test_one_linear_in_another_scheme_of_the_config(source: Path, tmp_path: Path) -> None:
    """ModelOpt's exports have FP8 beside NVFP4; a linear's files decide between them."""
    config = json.loads((source / "config.json").read_text())
    of = spelt(source, config, SPELLINGS["modelopt nvfp4"])
    eight = spelt(source, config, SPELLINGS["modelopt fp8"])
    attention = {name: tensor for name, tensor in eight.tensors.items() if "self_attn" in name}
    tensors = {name: tensor for name, tensor in of.tensors.items() if "self_attn" not in name} | attention
    found = dense_of(open_model(write_checkpoint(tmp_path / "x", of.config, tensors)), "float32")
    assert torch.equal(found["layers.1.attention.o"], dequant(eight.matrices[ATTENTION]).float())
    assert torch.equal(found["head"], dequant(of.matrices["lm_head"]).float())


def test_a_model_without_experts(made: Made, tmp_path: Path) -> None:
    (tmp_path / "dense").mkdir()
    write_random_model(tmp_path / "dense", DENSE)
    of = spelt(tmp_path / "dense", json.loads((tmp_path / "dense" / "config.json").read_text()), made[0])
    model = open_model(write_checkpoint(tmp_path / "x", *of[:2]))
    assert model.spec.moe is None and record_layout(model.spec, "bfloat16") is None
    found = dense_of(model, "float32")
    assert torch.equal(found["layers.1.ffn.down"], dequant(of.matrices["model.layers.1.mlp.down_proj"]).float())


def test_blocks_that_config_and_files_disagree_on(source: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    of = spelt(source, config, SPELLINGS["fp8 block"])
    of.config["quantization_config"] = {**of.config["quantization_config"], "weight_block_size": [BLOCK[0], 20]}
    refused(write_checkpoint(tmp_path / "x", *of[:2]), "weight_scale_inv has shape", "[3, 2]", "config.json wants")


@pytest.mark.parametrize("inner", ["model.language_model.", "language_model.model."])
def test_a_part_of_a_model_that_also_sees(made: Made, tmp_path: Path, inner: str) -> None:
    """The same tensors under another prefix, with names in config.json that keep the first one."""
    head = "language_model.lm_head." if inner == "language_model.model." else "lm_head."
    tensors = {
        name.replace("model.", inner, 1) if name.startswith("model.") else name.replace("lm_head.", head, 1): tensor
        for name, tensor in made[1].tensors.items()
    }
    config = {**made[1].config}
    config["quantization_config"] = {**made[0].config, "ignore": ["model.layers.0.mlp.gate"]}
    plain = open_model(write_checkpoint(tmp_path / "plain", made[1].config, made[1].tensors))
    other = open_model(write_checkpoint(tmp_path / "other", config, tensors))
    assert other.spec == plain.spec
    assert all(map(np.array_equal, banks_of(plain)[1], banks_of(other)[1]))
    expected = dense_of(plain, "bfloat16")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in dense_of(other, "bfloat16").items())


def test_modelopt_s_own_file_alone(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    of = spelt(source, config, SPELLINGS["modelopt nvfp4"])
    stated = write_checkpoint(tmp_path / "stated", of.config, of.tensors)
    alone = write_checkpoint(tmp_path / "alone", config, of.tensors)
    (alone / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert open_model(alone).spec == open_model(stated).spec
    assert all(map(np.array_equal, banks_of(open_model(alone))[1], banks_of(open_model(stated))[1]))
