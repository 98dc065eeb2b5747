"""How fast the link is: over a driver in Python, over memory, on a GPU."""

import pytest

from copyengine.link_rate import BUFFER_NBYTES, PIECE_NBYTES, gpu_rate, host_rate
from tests.copyengine.device.fake_cuda import CUresult, FakeCuda, FakeMachine


def test_memory_is_copied_at_some_rate() -> None:
    rate = host_rate(0.0)
    assert 1e6 < rate.nbytes_per_s < 1e12 and "memcpy" in rate.how


def test_a_gpus_link_is_measured_whole_and_everything_given_back() -> None:
    """Two buffers' worth are copied, the first in vain, piece by piece."""
    cuda = FakeCuda(FakeMachine(gpu_nbytes=2 * BUFFER_NBYTES))
    rate = gpu_rate(1, cuda.driver(), 0.0)
    assert rate.nbytes_per_s > 0 and "cuda:1" in rate.how
    assert [nbytes for _, _, nbytes in cuda.copies] == [PIECE_NBYTES] * (2 * BUFFER_NBYTES // PIECE_NBYTES)
    assert not +cuda.live


def test_a_link_that_cannot_be_measured_says_why() -> None:
    for call in ("cuMemAlloc", "cuMemHostAlloc", "cuDevicePrimaryCtxRetain"):
        cuda = FakeCuda(FakeMachine(gpu_nbytes=2 * BUFFER_NBYTES))
        driver = cuda.driver()
        cuda.fails[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        rate = gpu_rate(0, driver, 0.0)
        assert rate.nbytes_per_s == 0.0 and "CUDA_ERROR_OUT_OF_MEMORY" in rate.how
        assert not +cuda.live


@pytest.mark.gpu
def test_this_machines_link() -> None:
    """Between what PCIe 3 x8 and what NVLink-C2C give."""
    assert 5e9 < gpu_rate(0).nbytes_per_s < 5e11
