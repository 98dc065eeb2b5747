"""`python -m scheduler.client`."""

import sys

from scheduler.client_cli import main

if __name__ == "__main__":
    sys.exit(main())
