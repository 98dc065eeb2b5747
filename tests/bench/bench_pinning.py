"""How fast host memory is pinned: by the driver in one call, or taken from the system by threads and then registered.

`python -m tests.bench.bench_pinning [--gb 8]` from the repository's root, on a machine with a GPU. A bank is one layer
of Qwen3.8-Flash-Next. What a virtual machine gives out for the first time is slow, whoever asks for it, so a pass over
all of it comes first. BANK_THREADS and TOUCH_THREADS of copyengine/device/cuda.py follow from this, and
that banks are registered.
"""

import argparse
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import Struct

from copyengine.checkpoint.parallel import run_all
from copyengine.device.cuda_driver import Driver, load_driver
from copyengine.device.cuda_gpu import Gpu
from copyengine.device.pinned import PinnedBank, Pinning
from tests.bench.report import conditions, gpu_driver, table

BANK_NBYTES = 512 * 2_764_800
Pin = Callable[[Gpu, int], PinnedBank]


class Times(Struct, frozen=True):
    """Seconds for all banks: to get them, to copy them to the GPU, to free them."""

    pin_s: float
    copy_s: float
    free_s: float


def main() -> None:
    """Measure all ways, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=8.0, help="how much to pin")
    parser.add_argument("--out", type=Path, help="Markdown file for the results")
    options = parser.parse_args()
    driver = load_driver()
    gpu = Gpu(driver, driver.device(0))
    gpu.enter()
    banks = max(1, round(options.gb * 1e9 / BANK_NBYTES))
    rows = []
    for name, pin, threads in ways():
        times = measure(gpu, pin, banks, threads)
        rows.append(row(name, threads, times, banks * BANK_NBYTES))
        print(" | ".join(rows[-1]), flush=True)
    head = ("how", "banks at a time", "pinned in, s", "GB/s", "copied at, GB/s", "freed in, s")
    title = f"# Pinning {banks * BANK_NBYTES / 1e9:.1f} GB"
    text = "\n\n".join((title, cuda_conditions(driver.name(gpu.device)), table(head, rows)))
    gpu.close()
    print(text)
    if options.out:
        options.out.write_text(text + "\n", "utf-8")


def cuda_conditions(name: str, packages: Sequence[str] = ("cuda-bindings", "numpy")) -> str:
    """For a benchmark on the GPU `name` that uses these packages."""
    return conditions(f"{name}, driver {gpu_driver()}, {os.cpu_count()} cores", packages)


def ways() -> list[tuple[str, Pin, int]]:
    """Name, function and how many banks at a time; the first pass is for the machine to have the memory."""
    touched = {threads: partial(register, threads) for threads in (1, 8)}
    return [
        ("first pass: registered, 8 threads touch", touched[8], 1),
        *(("by the driver", allocate, threads) for threads in (1, 2, 4, 8)),
        *(("registered, 8 threads touch", touched[8], threads) for threads in (1, 2, 4)),
        ("registered, 1 thread touches", touched[1], 8),
        ("by the driver, again", allocate, 1),
    ]


def allocate(gpu: Gpu, nbytes: int) -> PinnedBank:
    """By the driver, in one call."""
    gpu.enter()
    address = gpu.driver.allocate_host(nbytes)
    array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return PinnedBank(address, nbytes, array, partial(gpu.driver.free_host, address))


def register(touch: int, gpu: Gpu, nbytes: int) -> PinnedBank:
    """With so many threads for the pages."""
    return Pinning(gpu.driver, gpu.enter).bank(nbytes, touch)


def measure(gpu: Gpu, pin: Pin, banks: int, threads: int) -> Times:
    """Pin `banks` banks, `threads` of them at a time, copy each to the GPU, free them."""
    start = time.perf_counter()
    pinned = run_all([partial(pin, gpu, BANK_NBYTES)] * banks, threads, "bank")
    pin_s = time.perf_counter() - start
    copy_s = copy_all(gpu.driver, pinned)
    start = time.perf_counter()
    for bank in pinned:
        bank.close()
    return Times(pin_s, copy_s, time.perf_counter() - start)


def copy_all(driver: Driver, banks: list[PinnedBank]) -> float:
    """Seconds for one copy each, to the same place."""
    target, stream, event = driver.allocate(BANK_NBYTES), driver.stream(), driver.event()
    start = time.perf_counter()
    for bank in banks:
        driver.copy_to_device(target, bank.address, bank.nbytes, stream)
    driver.record(event, stream)
    while not driver.has_happened(event):
        pass
    copy_s = time.perf_counter() - start
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.free(target)
    return copy_s


def row(name: str, threads: int, times: Times, nbytes: int) -> tuple[str, ...]:
    """One of the table."""
    rates = (f"{nbytes / 1e9 / seconds:.1f}" for seconds in (times.pin_s, times.copy_s))
    pin, copy = rates
    return name, str(threads), f"{times.pin_s:.2f}", pin, copy, f"{times.free_s:.2f}"


if __name__ == "__main__":
    main()
