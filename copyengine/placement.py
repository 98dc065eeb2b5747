"""Where the processes of a run go, and what memory there is: decided before anything is started.

`place` gives worker i the i-th GPU that can be used and says what the copy engine is; `memory_plan` says what is free
there, to be shared out (`copyengine.planning`). What this machine has is found in one place, `usable_gpus`, and only if
GPUs are wanted.
"""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from copyengine.device.cuda_driver import CudaError
from copyengine.device.probe import GpuFacts, find_gpus
from copyengine.model_spec import ModelSpec
from copyengine.planning import FreeGpu, Plan
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError

DeviceChoice = Literal["auto", "cpu", "cuda"]
CopyEngineForm = Literal["process", "thread"]
CopyEngineChoice = Literal["auto", "process", "thread"]

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which on a GPU has bfloat16."""


class Placement(Struct, frozen=True):
    """Where the processes of a run go."""

    gpus: tuple[GpuFacts, ...]  # worker i's is gpus[i]; none on the host
    copy_engine: CopyEngineForm
    reason: str  # of the device, for people
    copy_engine_reason: str = ""  # if it was not asked for

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Where the model runs."""
        return "cuda" if self.gpus else "cpu"


def place(device: DeviceChoice, copy_engine: CopyEngineChoice, workers: int) -> Placement:
    """The devices and the copy engine that the settings want. ConfigError if the machine does not have them."""
    found: list[GpuFacts] = []
    reason = "as --device says"
    if device != "cpu":
        found, why, left_out = usable_gpus()
        if device == "cuda" and not found:
            raise ConfigError(f"--device cuda: {why}; use --device cpu")
        if found and workers > len(found):
            raise ConfigError(
                f"--workers {workers}: each takes a GPU, and this machine has {len(found)} that can be used; "
                f"use --workers {len(found)}, or --device cpu{left_out}"
            )
        reason = (reason if device == "cuda" else f"--device auto: {why}") + left_out
    gpus = tuple(found[:workers])
    form, because = place_copy_engine(copy_engine, workers, gpus)
    return Placement(gpus, form, reason, because)


def place_copy_engine(choice: CopyEngineChoice, workers: int, gpus: Sequence[GpuFacts]) -> tuple[CopyEngineForm, str]:
    """What the copy engine is, and why if it was not asked for. ConfigError if it cannot be what was asked for."""
    private = next((gpu for gpu in gpus if not gpu.ipc), None)
    cause = f"GPU {private.ordinal} ({private.name}) cannot share its memory with other processes" if private else ""
    if choice == "process" and private:
        raise ConfigError(f"--copy-engine process: {cause}; use --copy-engine thread")
    if choice == "process" or (choice == "auto" and not private):
        return "process", ""
    if workers > 1:
        setting = f"{cause}, so that the copy engine has to be a thread; " if private else "--copy-engine thread "
        raise ConfigError(
            f"{setting}with --workers {workers}: every worker would hold all experts; "
            f"use {'' if private else '--copy-engine process or '}--workers 1"
        )
    return "thread", cause if choice == "auto" else ""


def usable_gpus() -> tuple[list[GpuFacts], str, str]:
    """The GPUs that a worker can run on; what was found, or why there are none; and, to be added to a text, which GPUs
    are left out beside usable ones, and why.
    """
    lacking = lacking_for_gpus()
    if lacking:
        return [], lacking, ""
    try:
        found = find_gpus()
    except CudaError as error:
        return [], str(error), ""
    usable = [gpu for gpu in found.gpus if gpu.capability >= LEAST_CAPABILITY]
    old = [_too_old(gpu) for gpu in found.gpus if gpu.capability < LEAST_CAPABILITY]
    useless = "; ".join(found.refused + old)
    if not usable:
        return [], useless or "no GPU was found", ""
    what = f"{len(usable)} GPUs were found" if len(usable) > 1 else "a GPU was found"
    return usable, what, f"; left out: {useless}" if useless else ""


def _too_old(gpu: GpuFacts) -> str:
    has, least = (".".join(map(str, capability)) for capability in (gpu.capability, LEAST_CAPABILITY))
    return f"GPU {gpu.ordinal} ({gpu.name}) has compute capability {has}, less than {least}"


def lacking_for_gpus() -> str:
    """Which package keeps a worker from running on a GPU, in words; empty if none does. Imports none of them."""
    torch = importlib.util.find_spec("torch")
    version = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    if version and version.exists() and not re.search(r"^cuda\b.*=\s*['\"]", version.read_text("utf-8"), re.MULTILINE):
        return "torch is installed without CUDA (install a CUDA build of it to use a GPU)"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    return ""


def memory_plan(spec: ModelSpec, dtype: str, placement: Placement, available_nbytes: int) -> Plan:
    """What there is for `spec` as `dtype`: `available_nbytes` of host memory, and what is free on the workers' GPUs."""
    record = record_layout(spec, dtype)
    gpus = tuple(FreeGpu(f"cuda:{gpu.ordinal} {gpu.name}", gpu.free_nbytes) for gpu in placement.gpus)
    return Plan(spec, dtype, record.record_nbytes if record else 0, available_nbytes, gpus)
