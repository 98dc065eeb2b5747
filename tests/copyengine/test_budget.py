"""The reserve of a GPU: against its constants."""

import pytest

from copyengine.budget import GPU_CONTEXTS_NBYTES, GPU_RESERVE_NBYTES, gpu_reserve_nbytes
from copyengine.wire.errors import ConfigError


def test_the_reserve_of_a_gpu() -> None:
    """As asked or the default; once the contexts are there, without them; less than those is refused."""
    assert gpu_reserve_nbytes(0) == GPU_RESERVE_NBYTES
    assert gpu_reserve_nbytes(0, started=True) == GPU_RESERVE_NBYTES - GPU_CONTEXTS_NBYTES
    for asked in (GPU_CONTEXTS_NBYTES, GPU_CONTEXTS_NBYTES + 1, 10 * GPU_RESERVE_NBYTES):
        assert gpu_reserve_nbytes(asked) == asked == gpu_reserve_nbytes(asked, started=True) + GPU_CONTEXTS_NBYTES
    for asked in (1, GPU_CONTEXTS_NBYTES - 1):
        with pytest.raises(ConfigError, match=f"--vram-reserve-bytes {asked}: .* {GPU_CONTEXTS_NBYTES} bytes"):
            gpu_reserve_nbytes(asked)
