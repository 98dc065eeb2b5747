"""gpt-oss quantised by us and served: against transformers, and against our engine on the dequantised weights."""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from copyengine.checkpoint.quantise import quantise_checkpoint
from copyengine.checkpoint.schemes import FUSED_MXFP4
from kernels.quant import Mxfp4, dequant, quant_mxfp4
from tests.worker.test_quantised_model import answer
from worker.protocol import Mode

SUFFIXES = ("experts.gate_up_proj", "experts.down_proj")
Tensors = dict[str, torch.Tensor]


def plain(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, N, K / 32, 16] and [E, N, K / 32] of the hub as transformers holds them: [E, K, N]."""
    pairs = zip(blocks.flatten(2), scales, strict=True)
    return torch.stack([dequant(Mxfp4(*pair)).float().T for pair in pairs]).contiguous()


def written(directory: Path, like: Path, tensors: Tensors) -> Path:
    """A checkpoint that is not quantised."""
    directory.mkdir()
    config = (like / "config.json").read_text()
    assert "quantization_config" not in config
    shutil.copy(like / "config.json", directory)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_weights_that_mxfp4_has_come_back_and_answer_as_transformers(goldens: Path, tmp_path: Path) -> None:
    """The goldens' hub checkpoint, written out as transformers saves it and quantised: no error at all, the weights of
    the hub's, and transformers' next tokens and logits."""
    hub = load_file(goldens / "gpt_oss_mxfp4" / "model.safetensors")
    stems = [name.removesuffix("_blocks") for name in hub if name.endswith("_blocks")]
    dense = {name: tensor for name, tensor in hub.items() if not name.endswith(("_blocks", "_scales"))}
    exact = {stem: plain(hub[f"{stem}_blocks"], hub[f"{stem}_scales"]) for stem in stems}
    source = written(tmp_path / "source", goldens / "gpt_oss", dense | exact)
    errors = quantise_checkpoint(source, tmp_path / "target", FUSED_MXFP4)
    assert len(errors) == 3 and all(error == 0 and squares > 0 for error, squares in errors.values())
    made: Tensors = {}
    for path in (tmp_path / "target").glob("*.safetensors"):
        made |= load_file(path)
    assert made.keys() == hub.keys()
    for stem in stems:
        assert torch.equal(plain(made[f"{stem}_blocks"], made[f"{stem}_scales"]), exact[stem])
    golden = np.load(goldens / "gpt_oss_mxfp4.npz")
    found = answer(tmp_path / "target", "demand", tokens=1, prompt=golden["ids"].tolist())
    np.testing.assert_allclose(
        found.prompt_bits[1].numpy(), golden["logits"], atol=1e-4 * np.abs(golden["logits"]).max()
    )


def test_the_answers_are_those_of_the_dequantised_weights(goldens: Path, tmp_path: Path) -> None:
    """A checkpoint that transformers saved; the weights dequantised by kernels.quant. Tokens, and logits as bits."""
    tensors = load_file(goldens / "gpt_oss" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(SUFFIXES)]:
        made = [dequant(quant_mxfp4(weight.T.contiguous())).float().T for weight in tensors[name]]
        tensors[name] = torch.stack(made).contiguous()
    exact = written(tmp_path / "exact", goldens / "gpt_oss", tensors)
    quantise_checkpoint(goldens / "gpt_oss", tmp_path / "target", FUSED_MXFP4)
    prompt = np.load(goldens / "gpt_oss.npz")["ids"].tolist()
    expected = answer(exact, "streamed", prompt=prompt)
    modes: tuple[Mode, ...] = ("demand", "streamed")
    for mode in modes:
        found = answer(tmp_path / "target", mode, prompt=prompt)
        assert found.tokens == expected.tokens
        assert all(torch.equal(*pair) for pair in zip(found.prompt_bits, expected.prompt_bits, strict=True))
    before = answer(goldens / "gpt_oss", "demand", tokens=1, prompt=prompt)
    assert not torch.equal(before.prompt_bits[1], expected.prompt_bits[1])
