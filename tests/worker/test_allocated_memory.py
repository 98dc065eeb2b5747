"""What is planned for a GPU, against what is allocated there once the largest steps have run."""

from pathlib import Path

import pytest

from tests.bench.flash_next import write_flash_next
from tests.worker.allocated_memory import Allocated, allocated

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

CLOSE = 0.03


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--chunked-prefill-size", "8192"),
        ("--max-running-requests", "64", "--chunked-prefill-size", "512"),
        ("--kv-placement", "host", "--token-embedding-placement", "host"),
    ],
)
def test_what_is_planned_is_what_is_allocated(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Flash-Next's geometry in four layers, with slots for all experts: all parts together within 3 %, so weights, KV
    and pool each; and the rest, two contexts and all, is no more than what stays free for it."""
    write_flash_next(tmp_path, layers=4)
    common = ("--device", "cuda", "--load-format", "dummy", "--model", str(tmp_path), "--port", "0", "--slots", "2048")
    seen: Allocated = allocated((*common, *flags))
    for part in seen.parts:
        if part.name != "workspace":
            assert abs(part.allocated_nbytes - part.planned_nbytes) <= CLOSE * max(part.planned_nbytes, 1 << 30), part
    assert abs(seen.total.allocated_nbytes - seen.total.planned_nbytes) <= CLOSE * seen.total.planned_nbytes, seen
    assert seen.rest.allocated_nbytes <= seen.rest.planned_nbytes, seen.rest
