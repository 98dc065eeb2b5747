"""Compiles Triton kernels for NVIDIA GPUs on a machine without one, and says what a program takes."""

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_NBYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Of one block, by compute capability."""

FEW_NBYTES = 32
"""Of a thread's stack: up to eight registers, which Triton 3.7 spills here and there, not hundreds of bytes."""


class Resources(NamedTuple):
    """Of one program."""

    shared_nbytes: int
    registers: int  # of a thread
    stack_nbytes: int  # of a thread: where spilled registers go


def compile_for(capability: int, kernel: Any, types: dict[str, str], arguments: dict[str, Any]) -> Any:
    """The compiled kernel. `arguments` are its constexprs and options; pointers are aligned to 16 bytes."""
    names = kernel.arg_names
    constants = {(i,): arguments[name] for i, name in enumerate(names) if name in arguments}
    signature = {name: "constexpr" if name in arguments else types[name] for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][:1] == "*"}
    options = {name: value for name, value in arguments.items() if name not in names}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(compiled: Any) -> Resources:
    """What the assembler says of the compiled kernel."""
    with TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert found is not None, text
    registers, stack, local = map(int, found.groups())
    return Resources(compiled.metadata.shared, registers, stack + local)


def expect_fits(
    kernel: Any, types: dict[str, str], arguments: dict[str, Any], capability: int = 90, stack_nbytes: int = FEW_NBYTES
) -> Any:
    """The compiled kernel, which fits the GPU's shared memory and takes no more of the stack than that."""
    compiled = compile_for(capability, kernel, types, arguments)
    taken = resources(compiled)
    assert taken.shared_nbytes <= SHARED_NBYTES[capability] and taken.stack_nbytes <= stack_nbytes, (taken, arguments)
    return compiled
