"""`python -m worker` that takes a second between its pool and the rest of its slots, for test_main.py."""

import sys
import time
from unittest.mock import patch

from worker.__main__ import main
from worker.mailbox import Mailbox


class SlowMailbox(Mailbox):
    """Comes a second late."""

    def __init__(self, *arguments: object) -> None:
        time.sleep(1)
        super().__init__(*arguments)  # type: ignore[arg-type]


if __name__ == "__main__":
    with patch("worker.host_slots.Mailbox", SlowMailbox):
        sys.exit(main())
