"""`python -m tests.copyengine.halting_copyengine N FLAGS`: a copy engine that halts for good in the middle of the Nth
run of bytes that it copies, for whoever ends it there."""

import sys
import threading
from collections.abc import Sequence

from copyengine.__main__ import main
from copyengine.device import Bank, Memory, Run, Stream
from copyengine.device.host import HostCopyDevice

SHORT_NBYTES = 128
"""What is missing of the run in which it halts."""


class HaltingDevice(HostCopyDevice):
    """Copies `whole` runs, and one but for its end."""

    whole = 0

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        """See CopyDevice."""
        for run in runs:
            if HaltingDevice.whole == 0:
                super().copy(
                    stream, source, target, [Run(run.source_offset, run.target_offset, run.nbytes - SHORT_NBYTES)]
                )
                threading.Event().wait()
            HaltingDevice.whole -= 1
            super().copy(stream, source, target, [run])


if __name__ == "__main__":
    HaltingDevice.whole = int(sys.argv.pop(1)) - 1
    copyengine_server = sys.modules["copyengine.server"]
    copyengine_server.HostCopyDevice = HaltingDevice  # type: ignore[attr-defined]
    sys.exit(main())
