"""sample against exact probabilities, brute-force supports and SplitMix64 in Python's integers.

The Triton kernels against the reference: their tokens are equal.
"""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.sampling import FORBIDDEN, RowSampling, sample
from kernels.sampling.ref import inverse_cdf, uniform

ROOT = Path(__file__).parents[2]
DRAWS = 4000


def rows_of(
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    position: int = 0,
    min_p: float = 0.0,
) -> RowSampling:
    """`count` rows of the same settings at consecutive positions."""
    return RowSampling(
        torch.full((count,), temperature, dtype=torch.float64),
        torch.full((count,), top_k),
        torch.full((count,), top_p, dtype=torch.float64),
        torch.full((count,), min_p, dtype=torch.float64),
        torch.full((count,), seed),
        torch.arange(position, position + count),
    )


def exact(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> list[float]:
    """The probabilities sampling must have, token by token, from the definition in float64."""
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    order = [i for i in order if weights[i] >= min_p * max(weights)]
    total = sum(weights[i] for i in order)
    kept: list[int] = []
    for i in order:
        if sum(weights[j] for j in kept) / total >= top_p:
            break
        kept.append(i)
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))]


LOGITS = [2.0, -1.0, 0.5, 2.0, 1.0, -3.0, 0.0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.0, 100, 1.0, 0.0),
        (1.0, 0, 0.3, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 0.999999, 0.0),
        (0.7, 4, 0.9, 0.0),
        (1.5, 2, 0.01, 0.0),
        (1.0, 0, 1.0, 0.2),
        (3.0, 0, 1.0, 0.2),
        (1.0, 0, 1.0, 1.0),
        (1.0, 0, 0.7, 0.1),
        (1.3, 4, 0.95, 0.3),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, -5])
def test_frequencies_are_those_of_the_exact_probabilities(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Chi-square over 4,000 fixed draws; nothing is drawn that has no probability, everything likely is."""
    expected = np.array(exact(LOGITS, temperature, top_k, top_p, min_p))
    logits = torch.tensor([LOGITS]).repeat(DRAWS, 1)
    tokens = sample(logits, rows_of(DRAWS, temperature, top_k, top_p, seed, min_p=min_p))
    counts = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    assert not counts[expected == 0].any()
    assert (counts[expected > 0.005] > 0).all()
    likely = expected > 0
    chi_square = ((counts[likely] - DRAWS * expected[likely]) ** 2 / (DRAWS * expected[likely])).sum()
    freedom = int(likely.sum()) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom + 1e-9)


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=9),
    st.integers(0, 10),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0),
)
def test_no_draw_leaves_the_support(values: list[int], top_k: int, top_p: float, min_p: float, seed: int) -> None:
    """Against the brute-force nucleus, on logits with many ties."""
    logits = [float(value) for value in values]
    probabilities = exact(logits, 1.0, top_k, top_p, min_p)
    rows = rows_of(20, 1.0, top_k, top_p, seed % 2**63, min_p=min_p)
    tokens = sample(torch.tensor([logits]).repeat(20, 1), rows)
    assert all(probabilities[token] > 0 for token in tokens.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """Against probabilities that are powers of two, where float64 sums are exact."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).double().log()
    for top_p, kept in ((0.5, 1), (0.500001, 2), (0.75, 2), (0.875, 3), (0.9, 4), (1e-9, 1)):
        tokens = sample(logits.repeat(300, 1), rows_of(300, 1.0, 0, top_p))
        assert set(tokens.tolist()) == set(range(kept)), top_p


def test_greedy_takes_the_lowest_id_of_the_largest_logit() -> None:
    """Against numpy's argmax."""
    logits = torch.randint(-3, 4, (200, 129), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tokens = sample(logits, rows_of(200, temperature=0.0))
    np.testing.assert_array_equal(tokens.numpy(), logits.float().numpy().argmax(axis=1))


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    """Against the argmax: logits / 1e-300 would overflow."""
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert sample(logits, rows_of(1, temperature=1e-300)).tolist() == [1]


def test_a_row_is_drawn_the_same_whatever_else_is_in_the_batch() -> None:
    """Against the row drawn alone."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 50, generator=generator)
    rows = RowSampling(
        torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 1.0], dtype=torch.float64),
        torch.tensor([0, 0, 5, 0, 20, 1]),
        torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 1.0], dtype=torch.float64),
        torch.tensor([0.0, 0.0, 0.01, 0.3, 0.0, 0.0], dtype=torch.float64),
        torch.tensor([3, 3, 4, 5, 6, 7]),
        torch.tensor([10, 10, 10, 11, 12, 13]),
    )
    together = sample(logits, rows)
    for i in range(6):
        alone = RowSampling(*(column[i : i + 1] for column in rows))
        assert sample(logits[i : i + 1], alone).tolist() == together[i : i + 1].tolist()


def test_the_draw_is_splitmix64_of_seed_and_position() -> None:
    """Against the published algorithm in Python's integers."""

    def mix(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
        return word ^ (word >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed in (0, 1, 2**62, -1, -(2**63)):
        for position in (0, 1, 127, 2**31):
            key = mix((seed + golden) % 2**64)
            expected = (mix((key + (position + 1) * golden) % 2**64) >> 11) / 2**53
            assert uniform(torch.tensor([seed]), torch.tensor([position])).tolist() == [expected]


def test_draws_of_neighbouring_seeds_and_positions_are_uniform() -> None:
    """Against the uniform distribution: 100 seeds x 100 positions in 20 bins, chi-square; and no two are equal."""
    seed, position = torch.meshgrid(torch.arange(100), torch.arange(100), indexing="ij")
    draws = uniform(seed.flatten(), position.flatten())
    counts = torch.histc(draws, bins=20, min=0, max=1)
    assert len(set(draws.tolist())) == 10000
    assert ((counts - 500) ** 2 / 500).sum() < 19 + 5 * math.sqrt(38)


def test_the_ends_of_the_unit_interval_draw_nothing_impossible() -> None:
    """Against the support, for the smallest and the largest draw there is."""
    probabilities = torch.tensor([0.0, 0.1, 0.2, 0.7, 0.0], dtype=torch.float64)
    assert int(inverse_cdf(probabilities, 0.0)) == 1
    assert int(inverse_cdf(probabilities, 1 - 2**-53)) == 3
    assert int(inverse_cdf(probabilities * 3e-300, 1 - 2**-53)) == 3


def test_no_rows() -> None:
    """Against the shape."""
    assert sample(torch.zeros(0, 5), rows_of(0)).shape == (0,)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (rows_of(2, temperature=-1.0), "temperature"),
        (rows_of(2, temperature=math.inf), "temperature"),
        (rows_of(2, temperature=math.nan), "temperature"),
        (rows_of(2, top_p=0.0), "top_p"),
        (rows_of(2, top_p=1.1), "top_p"),
        (rows_of(2, top_k=-1), "top_k"),
        (rows_of(2, min_p=-0.1), "min_p"),
        (rows_of(2, min_p=1.1), "min_p"),
        (rows_of(2, min_p=math.nan), "min_p"),
        (rows_of(3), "temperature"),
        (rows_of(2)._replace(seed=torch.zeros(2)), "seed"),
    ],
)
def test_impossible_settings_are_refused(settings: RowSampling, match: str) -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match=match):
        sample(torch.zeros(2, 5), settings)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_row_whose_logits_are_not_finite_gets_no_token(bad: float, temperature: float, dtype: torch.dtype) -> None:
    """Against the docstring; its neighbours, with the largest finite values there are, are sampled as ever."""
    logits = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    logits[:, 3] = torch.finfo(dtype).min
    assert all(token != 3 for token in sample(logits, rows_of(3, temperature)).tolist())
    expected = sample(logits, rows_of(3, temperature)).tolist()
    logits[2, 4] = logits[1, 0] = bad
    assert sample(logits, rows_of(3, temperature)).tolist() == [expected[0], -1, -1]


@pytest.mark.parametrize(
    "vocabs", [("1", "16", "100"), pytest.param(("1", "16", "17", "100", "300"), marks=pytest.mark.slow)]
)
def test_the_triton_kernels_in_the_interpreter(vocabs: tuple[str, ...]) -> None:
    """Against the reference: the tokens are equal."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_sampling", *vocabs]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("vocab", [1, 1024, 32_000, 248_320, 1_048_576])
def test_the_triton_kernels_compile_for_hopper(vocab: int) -> None:
    """Against the shared memory and registers of sm_90."""
    pytest.importorskip("triton")
    from kernels.sampling import tri
    from tests.kernels.compiled_for import expect_fits

    doubles = ("temperature_ptr", "top_p_ptr", "min_p_ptr", "masses_ptr", "facts_ptr", "shares_ptr")
    types = dict.fromkeys(doubles, "*fp64") | {"maxima_ptr": "*fp32", "vocab": "i32", "stride": "i32"}
    types |= dict.fromkeys(("top_k_ptr", "seed_ptr", "position_ptr", "marks_ptr", "tokens_ptr"), "*i64")
    types |= dict.fromkeys(("ids_ptr", "counts_ptr", "chosen_ptr", "places_ptr"), "*i32")
    for dtype in ("*fp32", "*bf16"):
        types |= dict.fromkeys(("logits_ptr", "values_ptr"), dtype)
        for name, arguments in tri.arguments(vocab, room=min(vocab, tri.CANDIDATES)).items():
            expect_fits(getattr(tri, name), types, arguments)


CUTS = [(0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.953, 0.0), (0, 0.2713, 0.0), (20, 0.87, 0.0), (500, 0.9917, 0.0)]
CUTS += [(10**12, 1.0, 0.0), (1, 0.5, 0.0), (0, 1.0, 0.0513), (0, 0.913, 1e-7), (30, 0.953, 0.02), (0, 1.0, 1.0)]
KINDS = [(heat, *cuts) for heat in (0.0, 1.0, 0.6, 1e-300) for cuts in CUTS]
"""temperature, top_k, top_p, min_p; no top_p that a sum of equal probabilities could meet exactly."""


def rows_of_kinds(device: str) -> RowSampling:
    """A row of each of KINDS."""
    heat, k, p, least = (list(column) for column in zip(*KINDS, strict=True))
    index = torch.arange(len(KINDS), device=device)
    return RowSampling(
        torch.tensor(heat, dtype=torch.float64, device=device),
        torch.tensor(k, device=device),
        torch.tensor(p, dtype=torch.float64, device=device),
        torch.tensor(least, dtype=torch.float64, device=device),
        index * 7919 - 40_000,
        index * 31,
    )


ON_DEVICE = [(torch.float32, vocab) for vocab in (1, 1023, 1025, 32_000, 248_320)]
ON_DEVICE += [(torch.bfloat16, 1024), (torch.bfloat16, 248_320), (torch.float16, 32_000)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "vocab"), ON_DEVICE)
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_the_device_s_tokens_are_the_reference_s(dtype: torch.dtype, vocab: int, spread: float) -> None:
    """Against the CPU: flat rows, whose nucleus is larger than the room for candidates, and peaked ones; ties."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(KINDS), vocab, generator=generator) * spread).to(dtype)
    tokens = sample(logits.cuda(), rows_of_kinds("cuda")).tolist()
    expected = sample(logits.float(), rows_of_kinds("cpu")).tolist()
    assert tokens == expected, [kind for kind, a, b in zip(KINDS, tokens, expected, strict=True) if a != b]


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [0.0, -100.0, -1e9, torch.finfo(torch.float32).min])
def test_the_device_draws_from_equal_and_masked_logits(mask: float) -> None:
    """Against the CPU: one band holds them all, or nine tenths of them are far below, as those a grammar forbids."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.zeros(len(KINDS), 248_320)
    logits[::2] = torch.randn(len(KINDS[::2]), 248_320, generator=generator) * 3
    logits[1::4] = -0.0
    logits[torch.rand(logits.shape, generator=generator) < 0.9] += mask
    tokens = sample(logits.cuda(), rows_of_kinds("cuda")).tolist()
    expected = sample(logits, rows_of_kinds("cpu")).tolist()
    assert tokens == expected, [kind for kind, a, b in zip(KINDS, tokens, expected, strict=True) if a != b]


@pytest.mark.gpu
def test_the_device_draws_many_times_what_the_reference_draws() -> None:
    """Against the CPU, 500 draws of each kind from one distribution with ties."""
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(5)).mul(3).round()
    for heat, k, p, least in KINDS:
        rows = rows_of(500, heat, k, p, seed=-9, min_p=least)
        tokens = sample(logits.expand(500, -1).cuda(), RowSampling(*(column.cuda() for column in rows)))
        assert torch.equal(tokens.cpu(), sample(logits.expand(500, -1), rows)), (heat, k, p, least)


@pytest.mark.gpu
@pytest.mark.parametrize("left", [1, 2, 30])
def test_the_device_draws_from_the_few_that_a_grammar_leaves(left: int) -> None:
    """Against the CPU, and against those that are left."""
    generator = torch.Generator().manual_seed(left)
    logits = torch.randn(len(KINDS), 151_936, generator=generator) * 4
    kept = torch.randint(0, 151_936, (len(KINDS), left), generator=generator)
    masked = torch.full_like(logits, FORBIDDEN).scatter(1, kept, logits.gather(1, kept))
    tokens = sample(masked.cuda(), rows_of_kinds("cuda")).cpu()
    assert torch.equal(tokens, sample(masked, rows_of_kinds("cpu")))
    assert bool((kept == tokens[:, None]).any(dim=1).all())


@pytest.mark.gpu
def test_a_row_on_the_device_is_drawn_the_same_alone() -> None:
    """Against the row in a batch."""
    logits = torch.randn(len(KINDS), 152_000, device="cuda", generator=torch.Generator("cuda").manual_seed(2)) * 3
    rows = rows_of_kinds("cuda")
    together = sample(logits, rows)
    for i in range(len(KINDS)):
        alone = RowSampling(*(column[i : i + 1] for column in rows))
        assert torch.equal(sample(logits[i : i + 1], alone), together[i : i + 1])


@pytest.mark.gpu
def test_the_device_gives_rows_that_are_not_finite_no_token() -> None:
    """Against the docstring, in the first, a middle and the last chunk; and its limits."""
    logits = torch.randn(6, 5000, device="cuda")
    for heat in (0.0, 1.0):
        rows = RowSampling(*(column.cuda() for column in rows_of(6, heat)))
        expected = sample(logits, rows).tolist()
        for bad in (math.nan, math.inf, -math.inf):
            damaged = logits.clone()
            damaged[1, 0] = damaged[3, 2500] = damaged[5, 4999] = bad
            assert sample(damaged, rows).tolist() == [expected[0], -1, expected[2], -1, expected[4], -1]
    assert sample(logits[:0], RowSampling(*(column.cuda() for column in rows_of(0)))).shape == (0,)
    with pytest.raises(ValueError, match="float64"):
        sample(logits.double(), RowSampling(*(column.cuda() for column in rows_of(6))))


@pytest.mark.gpu
def test_a_captured_draw_replays_with_other_settings() -> None:
    """Against the same launches outside the graph."""
    logits = torch.randn(len(KINDS), 32_000, device="cuda") * 3
    rows = rows_of_kinds("cuda")
    sample(logits, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, rows)
    for shift in range(3):
        for column in rows:
            column.copy_(column.roll(shift))
        logits.normal_()
        graph.replay()
        replayed = tokens.clone()
        assert torch.equal(replayed, sample(logits, rows))
