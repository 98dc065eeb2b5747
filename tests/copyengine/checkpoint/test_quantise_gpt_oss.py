"""gpt-oss' experts quantised into the hub's spelling: against kernels.quant, tensor by tensor, and interrupted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.names import dense_names
from copyengine.checkpoint.quantise import main, quantise_checkpoint, report
from copyengine.checkpoint.random_model import write_random_model
from copyengine.checkpoint.schemes import COMPRESSED_MXFP4, FUSED_MXFP4
from copyengine.families import parse_spec
from copyengine.families.gpt_oss import PLAIN
from kernels.quant import dequant, quant_mxfp4
from tests.copyengine.checkpoint.quantised_files import SIZES
from tests.copyengine.checkpoint.test_fused_mxfp4 import CONFIG, HIDDEN, INNER, E
from tests.copyengine.checkpoint.test_quantise import (
    Interrupted,
    assert_same_tensors,
    files_of,
    refused,
    tensors_of,
)

SOURCE = {**{key: value for key, value in CONFIG.items() if key != "quantization_config"}, "torch_dtype": "bfloat16"}
KINDS = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
SMALL = 9000
"""Bytes in a shard: about one tensor of all experts with its scales."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Experts as transformers holds them: one tensor of all of a layer, [E, K, N], gate and up alternating in N."""
    generator = torch.Generator().manual_seed(0)
    shapes = {entry.source: entry.shape for entry in dense_names(parse_spec(SOURCE), PLAIN)}
    for i in range(2):
        for name, (rows, columns) in KINDS.items():
            shapes[f"model.layers.{i}.mlp.experts.{name}"] = (E, columns, rows)
            shapes[f"model.layers.{i}.mlp.experts.{name}_bias"] = (E, rows)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    directory = tmp_path / "source"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(SOURCE))
    return directory


def expected(source: Path) -> tuple[dict[str, torch.Tensor], dict[int, list[float]]]:
    """All tensors, and by layer the sums of the squared error and of the squared weights."""
    tensors, sums = tensors_of(source), {0: [0.0, 0.0], 1: [0.0, 0.0]}
    for i in range(2):
        for name, (rows, columns) in KINDS.items():
            stem = f"model.layers.{i}.mlp.experts.{name}"
            weights = [weight.T.contiguous() for weight in tensors.pop(stem)]
            made = [quant_mxfp4(weight) for weight in weights]
            tensors[f"{stem}_blocks"] = torch.stack([of.codes for of in made]).reshape(E, rows, columns // 32, 16)
            tensors[f"{stem}_scales"] = torch.stack([of.scales for of in made])
            for weight, of in zip(weights, made, strict=True):
                sums[i][0] += float((dequant(of) - weight.double()).square().sum())
                sums[i][1] += float(weight.double().square().sum())
    return tensors, sums


@pytest.mark.parametrize("shard_nbytes", [1, SMALL, 10**9])
def test_all_tensors_are_the_hub_s_and_what_is_no_linear_stays(source: Path, tmp_path: Path, shard_nbytes: int) -> None:
    """Biases among it; a tensor of all experts is in one shard, however small that is."""
    target = tmp_path / "target"
    errors = quantise_checkpoint(source, target, FUSED_MXFP4, shard_nbytes)
    tensors, sums = expected(source)
    assert_same_tensors(tensors_of(target), tensors)
    assert {layer: list(of) for layer, of in errors.items()} == {layer: pytest.approx(of) for layer, of in sums.items()}
    if shard_nbytes == SMALL:
        sizes = [sum(x.nbytes for x in load_file(path).values()) for path in target.glob("*.safetensors")]
        assert len(sizes) > 2 and max(sizes) <= SMALL
    stated = json.loads((target / "config.json").read_text())
    kept = stated.pop("quantization_config")
    assert stated == SOURCE and kept["quant_method"] == "mxfp4"
    linears = {f"self_attn.{part}_proj" for part in "qkvo"} | {"mlp.router"}
    named = {f"model.layers.{i}.{name}" for i in range(2) for name in linears}
    assert set(kept["modules_to_not_convert"]) == named | {"model.embed_tokens", "lm_head"}
    kind = open_model(target).spec.expert_format
    assert (kind.name, kind.bias, kind.swiglu_limit) == ("mxfp4", True, 7.0)


def test_what_was_interrupted_goes_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a run that was not: the same files, byte for byte."""
    target, whole = tmp_path / "target", tmp_path / "whole"
    errors = quantise_checkpoint(source, whole, FUSED_MXFP4, SMALL)
    with monkeypatch.context() as patch:
        Interrupted(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            quantise_checkpoint(source, target, FUSED_MXFP4, SMALL)
    assert len(list(target.glob("*.safetensors"))) == 2
    again = Interrupted(monkeypatch, 99, KeyboardInterrupt())
    assert quantise_checkpoint(source, target, FUSED_MXFP4, SMALL) == errors
    assert files_of(target) == files_of(whole)
    assert len(again.made) == len(list(target.glob("*.safetensors"))) - 2


def test_the_command_takes_the_family_s_own_spelling(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the function; the formats that gpt-oss' files cannot have are refused with the one they can."""
    assert main([str(source), str(tmp_path / "target"), "--format", "mxfp4"]) == 0
    errors = quantise_checkpoint(source, tmp_path / "other", FUSED_MXFP4)
    assert capsys.readouterr().out == f"{report(errors)}\n{tmp_path / 'target'}\n"
    assert files_of(tmp_path / "target") == files_of(tmp_path / "other")
    for more in (["nvfp4"], ["fp8_block"], ["mxfp4", "--dialect", "compressed-tensors"]):
        assert main([str(source), str(tmp_path / "third"), "--format", *more]) == 2
        told = capsys.readouterr().err
        assert "GptOssForCausalLM cannot be written as" in told and "--format mxfp4 without --dialect" in told
    assert not (tmp_path / "third").exists()


def test_other_families_are_not_written_like_gpt_oss(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_random_model(other, replace(SIZES, hidden=64, intermediate=32))
    refused(other, tmp_path / "target", "Qwen3Moe", "gpt-oss' MXFP4", "leave --dialect out", scheme=FUSED_MXFP4)
    assert not (tmp_path / "target").exists()


def test_sizes_and_weights_that_cannot_be(source: Path, tmp_path: Path) -> None:
    """A width that is no multiple of 32; an element that is no number, by its tensor's name."""
    name, target = "model.layers.1.mlp.experts.down_proj", tmp_path / "target"
    tensors: dict[str, Any] = tensors_of(source)
    tensors[name][2, 5, 7] = float("inf")
    save_file(tensors, source / "model.safetensors")
    refused(source, target, name, "not finite", scheme=FUSED_MXFP4)
    refused(source, tmp_path / "third", "GptOssForCausalLM", scheme=COMPRESSED_MXFP4)
    for i in range(2):
        stem = f"model.layers.{i}.mlp.experts."
        for part, shape in {"gate_up_proj": (E, HIDDEN, 48), "gate_up_proj_bias": (E, 48)}.items():
            tensors[stem + part] = torch.zeros(shape)
        tensors[stem + "down_proj"] = torch.zeros(E, 24, HIDDEN)
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({**SOURCE, "intermediate_size": 24}))
    refused(source, tmp_path / "narrow", "32", "24", scheme=FUSED_MXFP4)
