"""A stored head of a model whose head is its embedding: against the embedding's own bytes, equal and changed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from copyengine.checkpoint import tied_head
from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.checkpoint.tied_head import warn_of_another_head
from worker.weights import load_dense

SIZES = Sizes(
    layers=1, hidden=16, intermediate=8, experts=2, experts_per_token=1, heads=2, kv_heads=1, head_dim=8, vocab_size=33,
    tie_word_embeddings=True, shards=1,
)  # fmt: skip


def warned(directory: Path, head: torch.Tensor | None, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether loading warns of `head`; the embedding is what is loaded in any case."""
    write_random_model(directory, SIZES)
    (path,) = directory.glob("*.safetensors")
    (directory / "model.safetensors.index.json").unlink()
    tensors = load_file(path)
    path.unlink()
    save_file(tensors | ({} if head is None else {"lm_head.weight": head}), directory / "model.safetensors")
    caplog.clear()
    weights = load_dense(open_model(directory), "bfloat16", torch.device("cpu"), lambda _: None)
    assert "head" not in weights and torch.equal(weights["embed"], tensors["model.embed_tokens.weight"])
    return "tie_word_embeddings" in caplog.text


def embedding(directory: Path) -> torch.Tensor:
    directory.mkdir()
    write_random_model(directory, SIZES)
    (path,) = directory.glob("*.safetensors")
    return load_file(path)["model.embed_tokens.weight"]


@pytest.mark.parametrize("piece_nbytes", [7, 64, 1 << 20])
def test_a_warning_where_it_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, piece_nbytes: int
) -> None:
    monkeypatch.setattr(tied_head, "PIECE_NBYTES", piece_nbytes)
    same = embedding(tmp_path / "first")
    last = same.clone()
    last[-1, -1] += 1
    heads = {"none": None, "same": same, "last": last, "shape": same[:, :8].contiguous(), "type": same.float()}
    found = {}
    for name, head in heads.items():
        (tmp_path / name).mkdir()
        found[name] = warned(tmp_path / name, head, caplog)
    assert found == {"none": False, "same": False, "last": True, "shape": True, "type": True}


def test_a_head_of_its_own_is_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    embedding(tmp_path / "tied")
    untied = tmp_path / "untied"
    untied.mkdir()
    write_random_model(untied, Sizes(1, 16, 8, 2, 1, 2, 1, 8, 33))
    warn_of_another_head(open_model(untied))
    assert open_model(untied).spare_head is None and not caplog.text
