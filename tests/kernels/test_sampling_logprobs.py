"""Log-probabilities against torch.log_softmax in float64, and their order against Python's sort."""

import pytest
import torch

from kernels.sampling import logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("vocab", "count"), [(1, 0), (1, 5), (50, 0), (50, 1), (50, 49), (50, 50), (50, 60), (5000, 20)]
)
def test_they_are_the_log_softmax_and_ties_go_to_the_lower_id(dtype: torch.dtype, vocab: int, count: int) -> None:
    """Half of the rows are full of ties, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(vocab + count)
    logits = torch.randn(6, vocab, generator=generator) * 5
    logits[3:] = logits[3:].div(5).round()
    logits = logits.to(dtype)
    tokens = torch.randint(vocab, (6,), generator=generator)
    found = logprobs(logits, tokens, count)
    expected = torch.log_softmax(logits.double(), dim=1)
    assert found.drawn.dtype == found.top.dtype == torch.float64
    torch.testing.assert_close(found.drawn, expected[range(6), tokens], rtol=0, atol=1e-12)
    for row in range(6):
        values = logits[row].tolist()
        order = sorted(range(vocab), key=lambda token: (-values[token], token))[:count]
        assert found.ids[row].tolist() == order
        torch.testing.assert_close(found.top[row], expected[row, order], rtol=0, atol=1e-12)


def test_a_row_that_is_not_finite_does_not_disturb_the_others() -> None:
    """Against the rows alone; such a row has no token, which -1 says."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    logits[1, 7] = float("nan")
    found = logprobs(logits, torch.tensor([4, -1, 39]), 5)
    alone = logprobs(logits[[0, 2]], torch.tensor([4, 39]), 5)
    for together, apart in zip(found, alone, strict=True):
        assert torch.equal(together[[0, 2]], apart)


def test_no_rows_and_other_types() -> None:
    """Against the docstring."""
    assert logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 3).top.shape == (0, 3)
    with pytest.raises(ValueError, match="float64"):
        logprobs(torch.zeros(1, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 11])
@pytest.mark.parametrize("vocab", [500, 32_000, 248_320])
def test_the_device_tells_what_the_host_tells(rows: int, vocab: int) -> None:
    """Against the CPU: the same tokens, ties included."""
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 4).to(torch.bfloat16).float()
    tokens = torch.arange(rows) * 31
    here, there = logprobs(logits, tokens, 20), logprobs(logits.cuda(), tokens.cuda(), 20)
    assert torch.equal(there.ids.cpu(), here.ids)
    torch.testing.assert_close(there.drawn.cpu(), here.drawn, rtol=0, atol=1e-9)
    torch.testing.assert_close(there.top.cpu(), here.top, rtol=0, atol=1e-9)
