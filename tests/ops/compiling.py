"""Compiles Triton kernels to machine code for GPUs that this machine need not have."""

import json
import os
import subprocess
import sys
from typing import Any

ARCHITECTURES = (80, 90)
# in a separate process, since triton cannot compile after it was imported for its interpreter
PROGRAM = """
import importlib, json, sys
from triton import compile, language
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for module, name, types, constants, warps, architecture in json.load(sys.stdin):
    kernel = getattr(importlib.import_module(module), name)
    types = {key: tuple(kind) if isinstance(kind, list) else kind for key, kind in types.items()}
    # a dtype among the constants is given by its name
    constants = {key: getattr(language, value) if key == "NARROW" else value for key, value in constants.items()}
    signature = {key: "constexpr" if key in constants else types[key] for key in kernel.arg_names}
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
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


def compile_kernels(module: str, kernels: list[tuple[str, dict[str, Any], dict[str, Any]]], warps: int = 4) -> None:
    """Fail if a kernel of a module, (name, types of arguments, values of constexprs), does not compile.

    Types as Triton writes them: "*bf16", "i32"; a list of them is a tuple of arguments.
    """
    jobs = [(module, *kernel, warps, architecture) for kernel in kernels for architecture in ARCHITECTURES]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
