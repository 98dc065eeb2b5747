"""Makes chosen calls fail in every Python that has this folder in PYTHONPATH, as tests/e2e/faulty_engine.py tells it.

The file that FAULTS_FILE names says which, as JSON, and may change at any time; calls are counted from the change on:

    {"copies": KIND, "at": [n, ...], "every": n}     of expert copies, the n-th runs of neighbouring records
        lie      success is told, and nothing is moved
        refuse   this one fails: what the driver would not take
        break    the driver reports an error that stays, as after an illegal address
    {"prefill": KIND, "at": [n, ...]}                of prefill steps, in the middle of which it happens
        memory   torch finds no memory for something
        hog      the same, because from then on until it is over all of the GPU's memory is taken
        error    torch reports an error of the device
        poison   the GPU computes an illegal address, after which its context is of no use

A process patches what it imports of it. Without FAULTS_FILE nothing is.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HOG_NBYTES = (
    *(1 << shift for shift in range(36, 20, -1)),
    (1 << 20) + 512,
    *(1 << shift for shift in range(20, 8, -1)),
)
"""64 GiB to 512 bytes, the smallest piece that torch gives. What is at most 1 MiB comes out of other blocks than what
is larger: of both kinds all is taken."""


class Faults:
    """What the file says now, and how often this process has been asked since it said so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0
        self._told: dict[str, Any] = {}
        self._count = 0
        self._lock = threading.Lock()

    def due(self, what: str) -> str:
        """The kind of fault of this call, "" for none."""
        with self._lock:
            changed = self._path.stat().st_mtime_ns
            if changed != self._seen:
                self._seen, self._count = changed, 0
                self._told = json.loads(self._path.read_text("utf-8"))
            if what not in self._told:
                return ""
            self._count += 1
            every = self._told.get("every", 0)
            due = self._count in self._told.get("at", ()) or (every and self._count % every == 0)
            return str(self._told[what]) if due else ""


def faulty_copies(faults: Faults, device: Any) -> None:
    """Of a copy engine's device, either backend."""
    copy = device.copy

    def copy_or_not(self: Any, stream: str, source: Any, target: Any, runs: Sequence[Any]) -> None:
        sound = []
        for run in runs:
            match faults.due("copies"):
                case "refuse":
                    from copyengine.wire.errors import CopyFailed

                    raise CopyFailed("cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE")
                case "break":
                    from copyengine.device.cuda_driver import CudaError

                    raise CudaError("cuMemcpyHtoDAsync", "CUDA_ERROR_ILLEGAL_ADDRESS")
                case "lie":
                    continue
            sound.append(run)
        if sound:
            copy(self, stream, source, target, sound)

    device.copy = copy_or_not


class FaultyPrefill:
    """A step's fault happens in its second MoE layer, when copies are under way and others were used."""

    LAYER = 1

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._due = ""
        self._held: list[Any] = []

    def patch_steps(self, runner: Any) -> None:
        """Of worker.step.StepRunner."""
        run = runner.run

        def run_or_not(slf: Any, step: Any) -> Any:
            self._due = self._faults.due("prefill") if step.mode != "decode" else ""
            try:
                return run(slf, step)
            finally:
                self._due = ""
                if self._held:
                    self._give_back()

        runner.run = run_or_not

    def patch_experts(self, experts: Any) -> None:
        """Of what computes a layer's experts."""
        compute = experts.__call__

        def compute_or_not(slf: Any, layer: int, *rest: Any) -> Any:
            if layer == self.LAYER and self._due:
                self._happen()
            return compute(slf, layer, *rest)

        experts.__call__ = compute_or_not

    def _happen(self) -> None:
        import torch

        match self._due:
            case "hog":
                self._take_all()
            case "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more of it.")
            case "error":
                raise RuntimeError("CUDA error: invalid argument")
            case "poison":
                torch.zeros(1, device="cuda")[torch.full((1,), 1 << 40, device="cuda")]

    def _take_all(self) -> None:
        """As many pieces of each size as there are, torch's own free ones too."""
        import torch

        for nbytes in HOG_NBYTES:
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    self._held.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))

    def _give_back(self) -> None:
        """To the driver, which needs some for graphs, and whoever else uses the GPU."""
        import torch

        self._held.clear()
        torch.cuda.empty_cache()


class Patcher(importlib.abc.MetaPathFinder):
    """Finds the modules that `patches` names where they are, and patches them once they are loaded."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See MetaPathFinder."""
        patch = self._patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def install(faults: Faults) -> None:
    """Patch what is imported from now on."""
    prefill = FaultyPrefill(faults)
    patches: dict[str, Callable[[ModuleType], None]] = {
        "copyengine.device.host": lambda module: faulty_copies(faults, module.HostCopyDevice),
        "copyengine.device.cuda": lambda module: faulty_copies(faults, module.CudaCopyDevice),
        "worker.step": lambda module: prefill.patch_steps(module.StepRunner),
        "worker.host_experts": lambda module: prefill.patch_experts(module.HostExperts),
        "worker.device_slots": lambda module: prefill.patch_experts(module.DeviceSlots),
    }
    sys.meta_path.insert(0, Patcher(patches))


def run_the_next(own: Path) -> None:
    """The sitecustomize that this one stands before, as under Windows' conditions."""
    for folder in map(Path, sys.path):
        script = folder / "sitecustomize.py"
        if folder.resolve() != own.parent and script.is_file():
            spec = importlib.util.spec_from_file_location("next_sitecustomize", script)
            assert spec is not None and spec.loader is not None
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


run_the_next(Path(__file__).resolve())
if "FAULTS_FILE" in os.environ:
    install(Faults(Path(os.environ["FAULTS_FILE"])))
