"""Against how often a made-up somebody is asked, and what is known of the answers by hand."""

import asyncio
import time

from copyengine.wire.errors import PeerDied
from scheduler.last_known import FRESH_S, LastKnown
from tests.scheduler.rig import on_loop


class Somebody:
    """Answers with how often it was asked, once `gate` is open."""

    def __init__(self) -> None:
        self.asked = 0
        self.gate = asyncio.Event()

    async def answer(self) -> int:
        self.asked += 1
        await self.gate.wait()
        if self.asked == 2:
            raise PeerDied("it is gone")
        return self.asked


def test_one_question_at_a_time_and_none_while_an_answer_is_fresh() -> None:
    async def main() -> None:
        somebody = Somebody()
        known = LastKnown(somebody.answer)
        start_s = time.monotonic()
        asking = known.ask(start_s)
        assert asking and known.answer is None
        assert known.ask(start_s + 9 * FRESH_S) is asking, "its answer is due"
        await asyncio.sleep(0)
        assert somebody.asked == 1
        somebody.gate.set()
        await asking
        assert known.answer == 1 and 0 <= known.age_s(time.monotonic()) < 10
        assert known.ask(start_s + 0.9 * FRESH_S) is None
        assert known.ask(start_s + 1.1 * FRESH_S) is not None

    on_loop("selector", main)


def test_an_error_leaves_the_answer_before_it_and_the_next_question_is_put() -> None:
    async def main() -> None:
        somebody = Somebody()
        somebody.gate.set()
        known = LastKnown(somebody.answer)
        for asked, wanted in ((1, 1), (2, 1), (3, 3)):
            asking = known.ask(time.monotonic() + asked * FRESH_S)
            assert asking
            await asking
            assert (somebody.asked, known.answer) == (asked, wanted)

    on_loop("selector", main)
