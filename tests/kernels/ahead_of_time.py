"""Compiles Triton kernels for a Hopper GPU on a machine without one."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_NBYTES = 227 * 1024
"""Of one block on sm_90."""


def compile_for_hopper(kernel: Any, types: dict[str, str], arguments: dict[str, Any]) -> Any:
    """The compiled kernel. `arguments` are its constexprs and options; pointers are aligned to 16 bytes."""
    names = kernel.arg_names
    constants = {(i,): arguments[name] for i, name in enumerate(names) if name in arguments}
    signature = {name: "constexpr" if name in arguments else types[name] for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "")[:1] == "*"}
    options = {name: value for name, value in arguments.items() if name not in names}
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
