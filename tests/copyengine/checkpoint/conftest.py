"""Checkpoints saved by transformers, in a process of its own: our `kernels` package would shadow the one it probes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MadeOnce

SAVE = """
import sys, torch
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.manual_seed(0)
root = Path(sys.argv[1])
base = dict(vocab_size=131, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=512, head_dim=16, rope_theta=50000.0)
moe = dict(base, moe_intermediate_size=24, num_experts_per_tok=2, norm_topk_prob=True)

def save(name, model, dtype, size="1GB"):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.to(dtype).save_pretrained(root / name, max_shard_size=size)

def save_moe(name, dtype, layers, size="1GB", **changes):
    save(name, Qwen3MoeForCausalLM(Qwen3MoeConfig(**moe, num_hidden_layers=layers, **changes)), dtype, size)

save_moe("moe8", torch.bfloat16, 3, num_experts=8, mlp_only_layers=[1])
save_moe("moe8_f32_tied", torch.float32, 2, num_experts=8, tie_word_embeddings=True)
save_moe("moe60_sharded", torch.bfloat16, 2, "60KB", num_experts=60, attention_bias=True)
save_moe("moe5_f16_sparse", torch.float16, 4, num_experts=5, decoder_sparse_step=2)
save("dense", Qwen3ForCausalLM(Qwen3Config(**base, num_hidden_layers=2, attention_bias=True)), torch.bfloat16)
"""

SAVED = ("moe8", "moe8_f32_tied", "moe60_sharded", "moe5_f16_sparse", "dense")


def _save(root: Path) -> None:
    (root / "save.py").write_text(SAVE)
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", str(root / "save.py"), str(root)]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def saved(made_once: MadeOnce) -> Path:
    """The directory that holds one checkpoint directory for each name in SAVED. Nobody writes into it."""
    return made_once("transformers", _save)
