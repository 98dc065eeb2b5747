"""Qwen3.8-Flash-Next's expert geometry under an architecture that is served, to be loaded with made-up weights.

`python -m tests.bench.flash_next DIR [--layers N] [--small]` writes config.json and a tokenizer, no weights; then
`launch.py --model DIR --load-format dummy`. Attention is Qwen3-MoE's with Flash-Next's heads, every layer full.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from copyengine.checkpoint.builtin_text import TEXT
from copyengine.checkpoint.random_model import CHAT_TEMPLATE, SPECIAL_TOKENS, Sizes, model_config

FULL = Sizes(
    layers=48,
    hidden=2560,
    intermediate=640,
    experts=512,
    experts_per_token=10,
    heads=24,
    kv_heads=2,
    head_dim=256,
    vocab_size=248_320,
    max_position=32_768,
)
"""63.3 GiB of experts in 48 layers of 1.4 GB."""

SMALL = Sizes(
    layers=2,
    hidden=128,
    intermediate=64,
    experts=64,
    experts_per_token=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab_size=1_536,
    max_position=4_096,
)
"""For a processor: everything works, nothing is as large as it is."""

TOKENIZER_VOCAB = 1_600
"""About as many tokens as the text that it is trained on gives; ids above them have no text."""


def config(of: Sizes) -> dict[str, object]:
    """config.json: the experts are ModelOpt's NVFP4, all else is bfloat16."""
    quantisation = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    return {**model_config(of), "rope_theta": 10_000_000.0, "quantization_config": quantisation}


def write_flash_next(
    directory: Path, layers: int | None = None, vocab_size: int | None = None, small: bool = False
) -> Sizes:
    """Write the files into `directory`, which exists: FULL or SMALL, with another number of layers or tokens."""
    base = SMALL if small else FULL
    of = replace(base, layers=layers or base.layers, vocab_size=vocab_size or base.vocab_size)
    _write_json(directory / "config.json", config(of))
    _write_tokenizer(directory, of)
    return of


def _write_tokenizer(directory: Path, of: Sizes) -> None:
    _write_json(directory / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0})
    _write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE},
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(of.vocab_size, TOKENIZER_VOCAB),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def main(argv: Sequence[str]) -> int:
    """Write the directory that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--small", action="store_true", help="a geometry for a processor")
    stated = parser.parse_args(argv)
    stated.directory.mkdir(parents=True, exist_ok=True)
    write_flash_next(stated.directory, stated.layers, stated.vocab, stated.small)
    print(f"python launch.py --model {stated.directory} --load-format dummy")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
