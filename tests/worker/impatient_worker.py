"""`python -m worker` whose steps wait two seconds for their copies, for test_main.py."""

import sys

import worker.building
from worker.__main__ import main

if __name__ == "__main__":
    worker.building.COPY_DEADLINE_S = 2.0  # type: ignore[attr-defined]
    sys.exit(main())
