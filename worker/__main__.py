"""`python -m worker`: listens, brings torch in, loads when the scheduler asks for it, then runs its steps."""

import os
import secrets
import sys
from collections.abc import Sequence

import zmq.asyncio

from copyengine.device.cuda_driver import CudaError, load_driver
from copyengine.device.cuda_gpu import check_ordinal
from copyengine.device.host import end_now, reclaim_stale
from copyengine.wire import cli
from copyengine.wire.errors import ConfigError, PeerDied
from copyengine.wire.lifecycle import EXIT_PEER, Listening, Ready, StartFailed, announce
from copyengine.wire.logs import Log, configure_logging
from copyengine.wire.loop import resolve
from copyengine.wire.process import refuse, run_process
from worker.config import WorkerConfig
from worker.copy_engine_link import CopyEngineLink
from worker.load import EngineLoader
from worker.server import WorkerServer

STOP_STEP_S = 2.0
"""Seconds that a running step or load has to end when the process stops; then the process ends without it."""

KEPT_SHAPES = 128
"""Shapes of products on the CPU that oneDNN keeps compiled code for, and torch above it, together 0.9 MB a shape.

Their own 1,024 each are filled by prompts of all lengths over an hour, and look like a leak. Experts, whose rows are
filled up to few numbers (kernels/grouped_gemm/ref.py), and the other products of a chunk of 512 tokens have 70 at most:
a prompt of so many takes 215 ms of processor time with 128, 230 with 512 (the built-in model, 2-core AMD EPYC, torch
2.13, 2026-11)."""

log = Log(__name__)


async def serve(config: WorkerConfig) -> int:
    """Serve until Shutdown; cancelling it stops at once. ConfigError if the start is refused.

    The exit code: 1 if it ends because it can run no steps any more, EXIT_PEER if that is for want of a copy engine.
    """
    device = device_name(config)
    run_id = config.run_id or secrets.token_hex(4)
    context = zmq.asyncio.Context()
    link = CopyEngineLink(context, config, run_id)
    loader = EngineLoader(config, run_id, link)
    server = WorkerServer(context, loader)
    code = 0
    try:
        endpoint = server.bind(config.endpoint)
        announce(Listening(endpoint))
        reclaim_stale()
        await server.compute.run(lambda: bring_torch(config.threads))
        facts = {"endpoint": endpoint, "name": config.name, "copy_engine": link.kind, "device": device}
        announce(Ready({**facts, "event_loop": resolve(config.event_loop)}))
        await server.serve()
    except PeerDied as error:
        distrusted = server.engine is not None and server.engine.distrusts_copies()
        if distrusted:
            log.error("copies_distrusted", detail=str(error))
        else:
            log.error("copy_engine_lost", detail=str(error))
        announce(StartFailed("peer_died", str(error)))
        parted = await link.detach()
        code = 1 if link.kind == "thread" or (parted and not distrusted) else EXIT_PEER
    except Exception:
        code = 1  # also if it ends below without raising it
        raise
    finally:
        loader.close()
        await server.close()
        idle = await server.compute.idle(STOP_STEP_S)
        parted = await link.close()  # before the memory that it has mapped is freed
        if not idle or not parted or not await server.free(STOP_STEP_S):
            log.warning("end_forced", detail="a step, a load or a copy has not ended")
            end_now(code)
        context.term()
    return code


def device_name(config: WorkerConfig) -> str:
    """The device that the settings name, for people. ConfigError if the GPU is not there."""
    if config.device == "cpu":
        if config.ordinal:
            raise ConfigError(f"--ordinal {config.ordinal}: is only for --device cuda")
        return "cpu"
    try:
        driver = load_driver()
    except (ConfigError, CudaError) as error:
        raise ConfigError(f"--device cuda --ordinal {config.ordinal}: {error}") from None
    check_ordinal(driver, config.ordinal)
    return f"cuda:{config.ordinal} {driver.name(driver.device(config.ordinal))}"


def bring_torch(threads: int) -> None:
    """Import what computes, on the thread that will; torch keeps its number of threads per calling thread.

    OpenMP's threads must not spin at barriers: beside one busy process on 2 cores a decode step of the built-in model
    took 550 ms with 2 spinning threads, 17 ms with 2 that sleep, 13 ms with one (AMD EPYC, 2026-11).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch's OpenMP runtime is loaded
    for bound in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # read at the first product
        os.environ[bound] = str(KEPT_SHAPES)  # whatever it was: torch crashes over 0, and over what is no number
    import torch

    import worker.building
    import worker.engine  # noqa: F401

    torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) - 1))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    try:
        config = cli.parse(WorkerConfig, argv, "python -m worker")
    except ConfigError as error:
        return refuse(error)
    configure_logging(config.log_level, config.name)
    return run_process(lambda _: serve(config), config.event_loop, config.parent_pipe)


if __name__ == "__main__":
    sys.exit(main())
