"""A worker process whose model takes no time, so that only the scheduler works.

The worker's own server, protocol and compute thread with a made-up engine behind them: the next token is the last one
plus one, and every step reports the same expert traffic. With `--step-ms` a step takes that long, asleep.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

import zmq.asyncio

from copyengine.wire.lifecycle import Listening, announce
from copyengine.wire.process import Orders, run_process
from tests.scheduler.rig import restricted
from worker.compute import ComputeThread
from worker.protocol import (
    ExpertStats,
    LayerStatsReply,
    LayerTraffic,
    Load,
    Loaded,
    Mode,
    ResidencyReply,
    RunStep,
    SlotsVerified,
    StepDone,
)
from worker.server import OnProgress, WorkerServer

RECORD_NBYTES = 3 * 2**20
LAYERS, EXPERTS, ROUTED = 48, 128, 8
FIRST_TOKEN = 3
"""Those below end answers or have no text."""

TRAFFIC = ExpertStats(1, LAYERS * ROUTED, LAYERS * ROUTED - 2, 2, 2 * RECORD_NBYTES)


class InstantEngine:
    """See worker.server.Engine."""

    def __init__(self, load: Load, vocab_size: int, step_s: float) -> None:
        self._step_s = step_s
        kv_tokens = load.kv_tokens or 2**20
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.facts = Loaded(
            device="none", dtype="none", vocab_size=vocab_size, max_position=kv_tokens, moe_layers=LAYERS,
            experts=EXPERTS, experts_per_token=ROUTED, record_nbytes=RECORD_NBYTES, slots=EXPERTS, stream_slots=EXPERTS,
            kv_tokens=kv_tokens, page_tokens=load.page_tokens, kv_nbytes=0, bank_nbytes=0, pool_nbytes=0,
            dense_nbytes=0, copy_engine="process", load_s=0.0,
        )  # fmt: skip

    def run(self, step: RunStep) -> StepDone:
        """The token after each sequence's last one, or the last that a grammar allows."""
        if self._step_s:
            time.sleep(self._step_s)
        last = self.facts.vocab_size - 1
        tokens = [FIRST_TOKEN if s.tokens[-1] >= last else s.tokens[-1] + 1 for s in step.sequences]
        return StepDone([restricted(token, s) for token, s in zip(tokens, step.sequences, strict=True)], TRAFFIC)

    def stats(self) -> dict[Mode, ExpertStats]:
        """Nothing is counted."""
        return {"decode": ExpertStats(), "demand": ExpertStats(), "streamed": ExpertStats()}

    def verify_slots(self) -> SlotsVerified:
        return SlotsVerified(0, [])

    def damaged_steps(self) -> int:
        return 0

    def distrusts_copies(self) -> bool:
        return False

    def layer_stats(self) -> LayerStatsReply:
        """Nothing is counted."""
        return LayerStatsReply(LayerTraffic(), LayerTraffic(), LayerTraffic(), [])

    def with_oracle(self, reply: LayerStatsReply) -> LayerStatsReply:
        """See Engine."""
        return reply

    def residency(self) -> ResidencyReply:
        """All of them."""
        return ResidencyReply(LAYERS, EXPERTS, b"\xff" * (LAYERS * EXPERTS // 8))

    def resident(self) -> int:
        """All of them."""
        return EXPERTS

    def flush(self) -> None:
        """They are there again."""

    def release(self, why: str) -> None:
        """Nothing waits."""

    def close(self) -> bool:
        """There is nothing to free."""
        return True


async def serve(vocab_size: int, step_s: float) -> None:
    """Serve until cancelled."""
    context = zmq.asyncio.Context()

    async def loader(load: Load, compute: ComputeThread, on_progress: OnProgress) -> InstantEngine:
        return InstantEngine(load, vocab_size, step_s)

    server = WorkerServer(context, loader)
    announce(Listening(server.bind("tcp://127.0.0.1:0")))
    try:
        await server.serve()
    finally:
        await server.close()
        context.term()


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=0.0)
    stated = parser.parse_args(argv)

    async def run(orders: Orders) -> None:
        await serve(stated.vocab_size, stated.step_ms / 1e3)

    return run_process(run, "auto", parent_pipe=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
