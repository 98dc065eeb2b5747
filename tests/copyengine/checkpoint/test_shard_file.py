"""ShardFile: against safetensors' own reader."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from copyengine.checkpoint.header import ITEMSIZE, read_header
from copyengine.checkpoint.shard_file import Output, ShardFile, file_nbytes

TYPES = ("F32", "BF16", "U8", "F8_E4M3", "I64")


def output(number: int, dtype: str, elements: int) -> Output:
    return Output(f"t{number}", dtype, (elements,), elements * ITEMSIZE[dtype])


@given(
    kinds=st.lists(st.tuples(st.sampled_from(TYPES), st.integers(0, 9)), max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_bytes_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, int]], order: random.Random
) -> None:
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    outputs = [output(i, *kind) for i, kind in enumerate(kinds)]
    data = {made.name: bytes((7 * i + j) % 256 for j in range(made.nbytes)) for i, made in enumerate(outputs)}
    pieces = [(name, start) for name, whole in data.items() for start in range(0, len(whole), 5)]
    order.shuffle(pieces)
    with ShardFile(path, outputs) as file:
        for name, start in pieces:
            file.write(name, data[name][start : start + 5], start)
    found = dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    assert {name: (view["dtype"], view["shape"], bytes(view["data"])) for name, view in found.items()} == {
        made.name: (made.dtype, list(made.shape), data[made.name]) for made in outputs
    }
    assert path.stat().st_size == file_nbytes(outputs)
    assert all(ref.offset % ITEMSIZE[ref.dtype] == 0 for ref in read_header(path).values())


def test_a_file_that_failed_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    made = output(0, "F32", 3)
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="stop"), ShardFile(path, [made]) as file:
        file.write("t0", bytes(12))
        raise ValueError("stop")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x.safetensors", b"before")]
