"""Checksums of slots: Triton against plain torch, plain torch against numpy's (copyengine.checksums)."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from copyengine.checksums import BLOCK_WORDS, sums_of, weights_of
from kernels.checksum import MOST_SPLITS, check_records, new_record_checks, ref, slot_sums

ROOT = Path(__file__).parents[2]


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    script = [sys.executable, "-W", "error", "-m", "tests.kernels.interpreted_checksum"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("words", [1, BLOCK_WORDS - 1, BLOCK_WORDS, 3 * BLOCK_WORDS + 32])
def test_the_reference_sums_as_the_copy_engine_does(words: int) -> None:
    records = np.random.default_rng(words).integers(0, 256, (4, 4 * words), np.uint8)
    weights = weights_of(4 * words)
    slots = torch.tensor([2, -1, 0, 3, 2], dtype=torch.int32)
    sums = ref.slot_sums(torch.from_numpy(records), slots, *map(torch.from_numpy, weights))
    expected = sums_of(records, weights)
    assert sums.tolist() == [expected[2], 0, expected[0], expected[3], expected[2]]


def test_compiles_for_sm_90() -> None:
    """Both kernels, without a spilled register; a program reads a record's words 16 bytes at a time."""
    pytest.importorskip("triton")
    from kernels.checksum import tri
    from tests.kernels.compiled_for import expect_fits

    tables = {"slot_of": "*i32", "offsets": "*i32", "span": "*i32", "partial": "*i64", "experts": "i32"}
    records = {"pool": "*i32", "within": "*i64", "blocks": "*i64", "num_quads": "i32"}
    sizes = {"SPLITS": MOST_SPLITS, "num_warps": tri.WARPS}
    compiled = expect_fits(tri.sum_kernel, tables | records, sizes | {"BLOCK": BLOCK_WORDS, "ROUTED": True})
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    compared = tables | {"expected": "*i64", "damage": "*i64", "layer": "i32"}
    expect_fits(tri.compare_kernel, compared, sizes | {"BLOCK_E": 512})


def test_what_cannot_be_is_refused() -> None:
    """Against the docstrings."""
    ones = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="power of two"):
        new_record_checks(ones, ones[0], ones[0], torch.device("cpu"))
    checks = new_record_checks(ones, torch.ones(4, dtype=torch.int64), ones[0], torch.device("cpu"))
    slots, offsets, span = (torch.zeros(n, dtype=torch.int32) for n in (3, 4, 2))
    pool = torch.zeros(5, 48, dtype=torch.uint8)
    with pytest.raises(ValueError, match="layer 2 of 2"):
        check_records(checks, 2, pool, slots, span, offsets, 3)
    with pytest.raises(ValueError, match="of 3 experts"):
        check_records(checks, 0, pool, slots[:2], span, offsets, 3)
    for other in (pool.int(), pool[:, :40], torch.zeros(5, 64, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"pool must be|3 blocks of 4"):
            check_records(checks, 0, other, slots, span, offsets, 3)
    with pytest.raises(ValueError, match="slots must be"):
        slot_sums(checks, pool, slots.long())


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    from tests.kernels.checksum_cases import check_all

    check_all("cuda")


@pytest.mark.gpu
def test_large_records_on_a_gpu() -> None:
    """2.8 MB, of which each program has many blocks, beyond the first 2 GiB of a pool; in a graph, twice."""
    nbytes, slots = 2_800_128, 900
    generator = torch.Generator(device="cuda").manual_seed(1)
    pool = torch.randint(0, 256, (slots, nbytes), dtype=torch.uint8, device="cuda", generator=generator)
    within, blocks = (torch.from_numpy(numbers) for numbers in weights_of(nbytes))
    table = torch.tensor([slots - 1, -1, 0, 800], dtype=torch.int32, device="cuda")
    expected = ref.slot_sums(pool, table, within.cuda(), blocks.cuda())[None]
    checks = new_record_checks(expected.cpu(), within, blocks, pool.device)
    span = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    offsets = torch.arange(5, dtype=torch.int32, device="cuda")
    check_records(checks, 0, pool, table, span, offsets, 4)  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        check_records(checks, 0, pool, table, span, offsets, 4)
    graph.replay()
    assert checks.damage.tolist() == [0, 0]
    pool[800, nbytes - 1] ^= 128
    pool[slots - 1, 12345] ^= 1
    graph.replay()
    assert checks.damage.tolist() == [2, 0]
