"""write_random_model: against its own second run, the safetensors library, and transformers as a reader."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer

from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.random_model import CHAT_TEMPLATE, Sizes, write_random_model
from copyengine.checkpoint.reader import read_dense

SMALL = Sizes(layers=3, hidden=32, intermediate=8, experts=6, experts_per_token=2, heads=2, kv_heads=1, head_dim=16)

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
directory = sys.argv[1]
model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
assert not any(info.values()), info
tokenizer = AutoTokenizer.from_pretrained(directory)
ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)["input_ids"]
assert tokenizer.decode(ids) == "<|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n", tokenizer.decode(ids)
assert tokenizer.eos_token_id in model.generation_config.eos_token_id
model(torch.tensor([ids]))
"""


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        (tmp_path / name).mkdir()
        write_random_model(tmp_path / name, SMALL, seed=seed)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a") != files(tmp_path / "c")


def test_progress_adds_up(tmp_path: Path) -> None:
    counted: list[int] = []
    total = write_random_model(tmp_path, SMALL, progress=counted.append)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sum(counted) == total == index["metadata"]["total_size"]


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(layers=1, hidden=16, intermediate=8, experts=1, experts_per_token=1, vocab_size=5, shards=9),
        Sizes(layers=3, hidden=16, intermediate=9, experts=3, experts_per_token=3, vocab_size=258, dense_layers=(0, 2)),
        Sizes(layers=2, hidden=16, experts=0, vocab_size=259, tie_word_embeddings=True),
        Sizes(layers=5, hidden=16, intermediate=8, experts=129, experts_per_token=2, shards=3, fused_experts=True),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_geometry_opens(tmp_path: Path, sizes: Sizes, dtype: str) -> None:
    write_random_model(tmp_path, sizes, dtype=dtype)
    model = open_model(tmp_path)
    assert len(model.spec.layers) == sizes.layers and model.spec.checkpoint_dtype == dtype
    assert (tmp_path / "tokenizer.json").exists() == (sizes.vocab_size >= 259)


def test_the_scales_of_the_weights(tmp_path: Path) -> None:
    """Against the stated standard deviations."""
    write_random_model(tmp_path, Sizes(layers=1))
    model = open_model(tmp_path)
    weights = {name: np.asarray(array, np.float32) for name, array in read_dense(model, "float32", lambda _: None)}
    assert abs(weights["embed"].std() - 1.0) < 0.02
    assert abs(weights["layers.0.router"].std() * 16 - 2.0) < 0.1
    assert abs(weights["head"].std() * 16 - 3.0) < 0.1
    assert abs(weights["layers.0.attention.q"].std() * 16 - 1.0) < 0.05
    assert abs(weights["final_norm"].mean() - 1.0) < 0.05


@pytest.mark.parametrize("text", ["", "Hello", "wörld 🙂 日本", "\x00\x7f\r\n\t  ", "<|im_start|>user\n<|im_end|>"])
def test_the_tokenizer_spells_everything(tmp_path: Path, text: str) -> None:
    """A round trip."""
    write_random_model(tmp_path, SMALL)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SMALL.vocab_size
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_chat_template_is_chatml() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    text = jinja2.Template(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


def test_transformers_loads_it_without_a_missing_or_unexpected_tensor(tmp_path: Path) -> None:
    model, script = tmp_path / "model", tmp_path / "load.py"
    model.mkdir()
    write_random_model(model, SMALL)
    script.write_text(LOAD)
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", str(script), str(model)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
