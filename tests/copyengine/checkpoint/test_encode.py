"""The numpy quantisers of MXFP4 and FP8 against kernels.quant, bit for bit, and the checkpoints made with them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from copyengine.checkpoint import fp8, mxfp4, nvfp4
from copyengine.checkpoint.encode import encode, squared_error
from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.quantise import main, quantise_checkpoint
from copyengine.checkpoint.quantise_formats import scheme_of
from copyengine.checkpoint.random_model import write_random_model
from copyengine.checkpoint.schemes import (
    COMPRESSED_MXFP4,
    FUSED_MXFP4,
    MODELOPT,
    Scheme,
    compressed_fp8_block,
    fp8_block,
)
from copyengine.wire.errors import ConfigError
from kernels.quant import Matrix, dequant, quant, quant_fp8_block, quant_mxfp4
from tests.copyengine.checkpoint.spelt_linears import BLOCK, SIZES
from tests.copyengine.checkpoint.test_quantise import tensors_of

SCHEMES: dict[str, tuple[Scheme, tuple[str, str]]] = {
    "mxfp4 compressed-tensors": (COMPRESSED_MXFP4, ("weight_packed", "weight_scale")),
    "fp8_block fp8": (fp8_block(*BLOCK), ("weight", "weight_scale_inv")),
    "fp8_block compressed-tensors": (compressed_fp8_block(*BLOCK), ("weight", "weight_scale")),
}
ODD = st.sampled_from([0.0, -0.0, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 6.0, 448.0, 2.0**-140, 1e-45, 3e38])
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32) | ODD | st.floats(-8, 8, width=16)
MATRICES = st.integers(0, 5).flatmap(lambda rows: arrays(np.float32, (rows, 64), elements=NUMBERS))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def made_by_kernels(scheme: Scheme, weight: torch.Tensor) -> tuple[Matrix, list[torch.Tensor]]:
    """The matrix, and its tensors in the scheme's order."""
    if scheme.format == "mxfp4":
        packed = quant_mxfp4(weight)
        return packed, [packed.codes, packed.scales]
    eight = quant_fp8_block(weight, scheme.block)
    return eight, [eight.codes, eight.scales]


@settings(max_examples=150)
@given(MATRICES)
def test_mxfp4_of_any_numbers(weight: NDArray[np.float32]) -> None:
    theirs = quant_mxfp4(torch.from_numpy(weight))
    codes, scales = mxfp4.quantise(weight)
    assert (codes.tobytes(), scales.tobytes()) == (raw(theirs.codes), raw(theirs.scales))


@settings(max_examples=150)
@given(MATRICES, st.sampled_from([(1, 1), (2, 24), (3, 64), (128, 128), (1, 1 << 20)]))
def test_fp8_of_any_numbers(weight: NDArray[np.float32], block: tuple[int, int]) -> None:
    """Blocks that come out even, that do not, and that are larger than the matrix."""
    theirs = quant_fp8_block(torch.from_numpy(weight), block if block[1] < 1 << 20 else (1, 64))
    codes, scales = fp8.quantise(weight, block)
    assert (codes.tobytes(), scales.tobytes()) == (raw(theirs.codes), raw(theirs.scales))


@pytest.mark.parametrize("columns", [0, 32, 2080])
def test_large_matrices_in_pieces(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4, "PIECE_ELEMENTS", 5000)
    weight = np.random.default_rng(0).standard_normal((129, columns)).astype(np.float32)
    codes, scales = mxfp4.quantise(weight)
    theirs = quant_mxfp4(torch.from_numpy(weight))
    assert (codes.tobytes(), scales.tobytes()) == (raw(theirs.codes), raw(theirs.scales))
    of_blocks = quant_fp8_block(torch.from_numpy(weight), (128, 128))
    codes, factors = fp8.quantise(weight, (128, 128))
    assert (codes.tobytes(), factors.tobytes()) == (raw(of_blocks.codes), raw(of_blocks.scales))


@pytest.mark.parametrize("scheme", [scheme for scheme, _ in SCHEMES.values()], ids=list(SCHEMES))
def test_the_error_is_that_of_the_exact_matrices(scheme: Scheme) -> None:
    weight = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    error, squares = squared_error(weight, encode(scheme, [weight])[0], scheme)
    plain = torch.from_numpy(weight).double()
    exact = dequant(made_by_kernels(scheme, torch.from_numpy(weight))[0])
    assert error == pytest.approx(float((exact - plain).square().sum()))
    assert squares == pytest.approx(float(plain.square().sum()))


def test_the_error_of_nvfp4_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4, "PIECE_ELEMENTS", 100)
    weight = np.random.default_rng(0).standard_normal((9, 48)).astype(np.float32)
    error, squares = squared_error(weight, encode(MODELOPT, [weight])[0], MODELOPT)
    plain = torch.from_numpy(weight).double()
    assert error == pytest.approx(float((dequant(quant(torch.from_numpy(weight))) - plain).square().sum()))
    assert 0.05 < (error / squares) ** 0.5 < 0.12


@pytest.mark.parametrize("name", SCHEMES)
def test_checkpoints_hold_what_kernels_make_and_are_opened(tmp_path: Path, name: str) -> None:
    """Every tensor of every expert, everything else as it was; the errors of the layers are there."""
    scheme, suffixes = SCHEMES[name]
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    write_random_model(source, SIZES)
    errors = quantise_checkpoint(source, target, scheme, 200_000)
    assert list(errors) == [0, 2] and all(0 < error < 0.02 * squares for error, squares in errors.values())
    weights, found = tensors_of(source), tensors_of(target)
    for key, weight in weights.items():
        stem = key.removesuffix(".weight")
        if ".experts." not in key:
            assert torch.equal(found.pop(key), weight)
            continue
        for suffix, theirs in zip(suffixes, made_by_kernels(scheme, weight)[1], strict=True):
            ours = found.pop(f"{stem}.{suffix}")
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and raw(ours) == raw(theirs)
    assert not found
    kind = open_model(target).spec.expert_format
    assert (kind.name, kind.block) == (scheme.format, scheme.block)
    ignored = {"model.layers.0.mlp.gate", "lm_head", "model.layers.1.mlp.up_proj"}
    config: dict[str, Any] = json.loads((target / "config.json").read_text())["quantization_config"]
    assert ignored <= set(config.get("ignore") or config["modules_to_not_convert"])


def always(scheme: Scheme) -> bool:
    return True


def test_the_command_s_formats_dialects_and_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scheme_of("fp8_block", None, None, always) == fp8_block(128, 128)
    assert scheme_of("fp8_block", "compressed-tensors", "24,40", always) == compressed_fp8_block(24, 40)
    assert scheme_of("mxfp4", None, None, always) is COMPRESSED_MXFP4
    assert scheme_of("nvfp4", None, None, always) is MODELOPT
    assert scheme_of("mxfp4", None, None, lambda scheme: not scheme.tensors) is FUSED_MXFP4
    for (name, dialect, block), word in (
        (("mxfp4", "modelopt", None), "compressed-tensors"),
        (("nvfp4", None, "16,16"), "--block 16,16"),
        (("fp8_block", None, "0,128"), "--block 0,128"),
        (("fp8_block", None, "128"), "two numbers"),
        (("fp8_block", None, "x,1"), "two numbers"),
    ):
        with pytest.raises(ConfigError, match=word):
            scheme_of(name, dialect, block, always)
    source = tmp_path / "source"
    source.mkdir()
    write_random_model(source, SIZES)
    command = [str(source), str(tmp_path / "target"), "--format", "fp8_block"]
    assert main([*command, "--block", "24,40"]) == 0 and "layer 2:" in capsys.readouterr().out
    assert main(command) == 2 and "another scheme" in capsys.readouterr().err
