"""Estimates: against caches that are simulated, sums by hand, and what was measured on an H200."""

from collections import OrderedDict

import numpy as np
import pytest

from copyengine.forecast import (
    Routing,
    distinct_experts,
    even_routing,
    measured_routing,
    missing_experts,
    share_held_by_frequency,
    share_held_by_recency,
    zipf_routing,
)

LAYERS, EXPERTS, K = 4, 24, 3


def drawn(routing: Routing, tokens: int, seed: int) -> list[list[list[int]]]:
    """Experts of each token and layer, K distinct ones, each with its probability: systematic sampling in an order that
    is shuffled anew every time."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(tokens):
        layers = []
        for row in routing:
            order = rng.permutation(EXPERTS)
            marks = rng.random() + np.arange(K)
            places = np.searchsorted(np.cumsum(row[order]), marks)
            layers.append([int(order[min(place, EXPERTS - 1)]) for place in places])
        out.append(layers)
    return out


def hit_rate(texts: list[list[list[int]]], slots: int, held: set[tuple[int, int]] | None = None) -> float:
    """Of an LRU cache, after a third of the tokens; or of `held`, which stay."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = lookups = 0
    for t, layers in enumerate(texts):
        for layer, experts in enumerate(layers):
            for key in ((layer, expert) for expert in experts):
                if t > len(texts) // 3:
                    lookups += 1
                    hits += key in (cache if held is None else held)
                cache.pop(key, None)
                cache[key] = None
                if len(cache) > slots:
                    cache.popitem(last=False)
    return hits / lookups


@pytest.mark.parametrize("make", [even_routing, zipf_routing])
def test_shares_are_those_of_simulated_caches(make) -> None:  # type: ignore[no-untyped-def]
    routing = make(LAYERS, EXPERTS, K)
    texts = drawn(routing, 600, 0)
    likeliest = np.argsort(-routing, axis=None, kind="stable")
    for slots in (6, 16, 30, 50, 70, 90, 96):
        held = {divmod(int(place), EXPERTS) for place in likeliest[:slots]}
        assert abs(hit_rate(texts, slots, held) - share_held_by_frequency(routing, slots)) < 0.03
        recent, estimated = hit_rate(texts, slots), share_held_by_recency(routing, slots)
        assert -0.06 < recent - estimated < 0.13, slots  # between whole numbers of tokens it is the lower one's


def test_the_ends_of_the_scale() -> None:
    """No slot holds nothing, a slot for everybody holds all; even routing is S / (L x E) where whole tokens fit."""
    for make in (even_routing, zipf_routing):
        routing = make(LAYERS, EXPERTS, K)
        for share in (share_held_by_recency, share_held_by_frequency):
            assert share(routing, 0) == 0.0
            assert share(routing, LAYERS * EXPERTS) == pytest.approx(1.0)
    even = even_routing(LAYERS, EXPERTS, K)
    assert share_held_by_recency(even, LAYERS * K) == pytest.approx(K / EXPERTS) == LAYERS * K / (LAYERS * EXPERTS)
    assert share_held_by_recency(even, LAYERS * K - 1) == 0.0


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (4, 4), (5, 4), (128, 8), (512, 10), (60, 59)])
def test_routings_add_up_to_k(experts: int, k: int) -> None:
    for routing in (even_routing(2, experts, k), zipf_routing(2, experts, k)):
        np.testing.assert_allclose(routing.sum(axis=1), k)
        assert routing.shape == (2, experts) and (routing <= 1).all() and (np.diff(routing) <= 0).all()


def test_measured_counts() -> None:
    """By hand; a layer that nobody went through is even."""
    routing = measured_routing([[6, 3, 3, 0], [0, 0, 0, 0]], 2)
    np.testing.assert_allclose(routing, [[1.0, 0.5, 0.5, 0.0], [0.5] * 4])


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_distinct_experts_are_those_of_drawn_tokens(tokens: int) -> None:
    routing = zipf_routing(LAYERS, EXPERTS, K)
    counted = []
    for seed in range(40):
        text = drawn(routing, tokens, seed)
        counted.append(len({(layer, e) for layers in text for layer, experts in enumerate(layers) for e in experts}))
    assert abs(np.mean(counted) - distinct_experts(routing, tokens)) < 1.0
    assert missing_experts(routing, tokens, 0) == pytest.approx(distinct_experts(routing, tokens))
    assert missing_experts(routing, tokens, LAYERS * EXPERTS) == 0.0


def test_flash_next_as_it_was_measured() -> None:
    """README's figures of an H200: 2,100 slots, 24,576 experts of 2.77 MB, 55 GB/s. A streamed prompt took 1,137 ms;
    one sequence found 57 % of its experts, with routers fitted to reported times."""
    layers, experts, k, slots = 48, 512, 10, 2100
    streamed_ms = (layers * experts - slots) * 2_765_056 / 55e9 * 1e3
    assert abs(streamed_ms - 1137) < 12
    zipf = zipf_routing(layers, experts, k)
    assert share_held_by_recency(zipf, slots) < 0.57 < share_held_by_frequency(zipf, slots)
    for tokens, reported in {87: 0.44, 151: 0.56, 230: 0.65, 387: 0.79}.items():
        assert abs(distinct_experts(zipf, tokens) / (layers * experts) - reported) < 0.12
