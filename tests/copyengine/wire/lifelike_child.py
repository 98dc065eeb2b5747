"""A process as the supervisor's tests need it: `python -m tests.copyengine.wire.lifelike_child NAME [HABIT...]`.

It listens at once and is ready, answers each peer with Joined, ends at a drain, and has these habits: `stubborn` ends
by no request, `busy` takes no notice of a drain, `mute` says nothing, `deaf` does not answer whether it is alive,
`slow` takes SLOW_S to end.
"""

import os
import sys
import threading
import time

from copyengine.wire.lifecycle import Alive, Joined, Listening, Order, Peer, Ready, announce, watch_parent

SLOW_S = 0.2
"""Seconds that `slow` takes to end."""


def main() -> None:
    """Until it is told to end."""
    name, *habits = sys.argv[1:]
    end = threading.Event()

    def take(order: Order) -> None:
        if order == "alive":
            if "deaf" not in habits:
                announce(Alive())
        elif isinstance(order, Peer):
            announce(Joined(order.name, order.endpoint))
        elif "stubborn" not in habits and not (order == "drain" and "busy" in habits):
            end.set()

    watch_parent(take)
    if "mute" not in habits:
        announce(Listening(f"{name}:{os.getpid()}"))
        announce(Ready({"name": name}))
    end.wait()
    if "slow" in habits:
        time.sleep(SLOW_S)


if __name__ == "__main__":
    main()
