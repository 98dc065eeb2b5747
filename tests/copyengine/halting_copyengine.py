"""`python -m copyengine` that halts in the middle of each record that it copies, for whoever ends it there."""

import sys
import time
from collections.abc import Sequence

from copyengine.__main__ import main
from copyengine.device import Bank, Memory, Run, Stream
from copyengine.device.host import HostCopyDevice
from msgspec.structs import replace

HALT_S = 0.01
"""Seconds between the two halves of a record."""

_copy = HostCopyDevice.copy


def copy_by_halves(
    self: HostCopyDevice, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]
) -> None:
    """See CopyDevice."""
    for run in runs:
        half = run.nbytes // 2
        _copy(self, stream, source, target, [run._replace(nbytes=half)])
        time.sleep(HALT_S)
        rest = Run(run.source_offset + half, run.target_offset + half, run.nbytes - half)
        _copy(self, stream, source, target, [rest])


if __name__ == "__main__":
    HostCopyDevice.copy = copy_by_halves  # type: ignore[method-assign]
    sys.exit(main())
