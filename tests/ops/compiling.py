"""Compiles Triton kernels to machine code for GPUs that this machine need not have."""

import json
import os
import subprocess
import sys
from typing import Any

import torch

ARCHITECTURES = (80, 90)
# in a separate process, since triton cannot compile after it was imported for its interpreter
PROGRAM = """
import importlib, json, sys
from triton import compile, language
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def typed(kind, place):
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):
        return tuple(typed(part, (*place, i)) for i, part in enumerate(kind))
    if "constant" in kind:
        # a dtype is given by its name
        value = kind["constant"]
        places[place] = getattr(language, value) if isinstance(value, str) else value
        return "constexpr"
    struct = getattr(importlib.import_module(kind["module"]) if kind["module"] else module, kind["struct"])
    return struct(*(typed(kind["fields"][key], (*place, i)) for i, key in enumerate(struct._fields)))

for module, name, types, constants, warps, architecture in json.load(sys.stdin):
    module, places = importlib.import_module(module), {}
    kernel = getattr(module, name)
    types |= {key: {"constant": value} for key, value in constants.items()}
    signature = {key: typed(types[key], (i,)) for i, key in enumerate(kernel.arg_names)}
    compiled = compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", architecture, 32),
                       options={"num_warps": warps})
    assert compiled.asm["cubin"], (name, architecture)
"""

# compiles every launch of the program that follows, for the given architecture
LAUNCHES = """
import sys
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

answers = {"current_target": GPUTarget("cuda", int(sys.argv[1]), 32), "current_device": 0, "current_stream": 0}
answers["active_torch_device"] = torch.device("cpu")
driver.set_active(SimpleNamespace(**{f"get_{name}": lambda *_, x=x: x for name, x in answers.items()}))
launch = JITFunction.run
JITFunction.run = lambda *args, **kwargs: launch(*args, **kwargs | {"warmup": True})
"""


def compile_launches(program: str) -> None:
    """Run a program on CPU tensors, and fail if a kernel that it launches does not compile. Nothing is computed."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    for architecture in ARCHITECTURES:
        command = [sys.executable, "-W", "ignore", "-c", LAUNCHES + program, str(architecture)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]


def struct(name: str, module: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return the type of an argument that is a NamedTuple, from the types of its fields.

    module: where the NamedTuple is; None: in the module of the kernel.
    """
    return {"struct": name, "module": module, "fields": fields}


def settings_of(module: str | None = None, **values: Any) -> dict[str, Any]:
    """Return the type of the NamedTuple `Settings`, whose fields are constants."""
    return struct("Settings", module, **{key: {"constant": value} for key, value in values.items()})


def types_of_streams(
    streams: str, output: str, pending: bool, n: int, columns: int, dtype: torch.dtype, identity: bool = False
) -> dict[str, Any]:
    """Return the types of the arguments that the kernels of mhc and hyper_connections share."""
    from depthlm.ops.mhc import triton_streams

    x = torch.empty(1, 1, n, 2560, device="meta")
    settings = triton_streams.settings_of(x, columns, 1e-5, dtype, identity)._asdict()
    values = {key: value.value for key, value in settings.items()}
    values["dtype"] = str(dtype).removeprefix("torch.")
    maps = ["*fp32"] * (1 if identity else 2)
    sources = [streams, output, *maps] if pending else [streams]
    return {
        "sources": sources,
        "new_ptr": streams,
        "grads": [streams, streams, *maps],
        "grad_sources": sources,
        "positions": "i32",
        "d": "i32",
        "settings": settings_of(triton_streams.__name__, **values),
    }


def compile_kernels(module: str, kernels: list[tuple[str, dict[str, Any], dict[str, Any]]], warps: int = 4) -> None:
    """Fail if a kernel of a module, (name, types of arguments, values of constexprs), does not compile.

    Types as Triton writes them: "*bf16", "i32"; a list of them is a tuple of arguments.
    """
    jobs = [(module, *kernel, warps, architecture) for kernel in kernels for architecture in ARCHITECTURES]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
