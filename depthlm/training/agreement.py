"""Whether all ranks train the same run: with the same settings, code and token files."""

import dataclasses
import hashlib
import inspect
import json
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class

from depthlm.config import Config
from depthlm.config.keys import flatten
from depthlm.config.saved import targets
from depthlm.data import Corpus
from depthlm.distributed.collectives import gather
from depthlm.errors import UserError
from depthlm.locations import PACKAGE
from depthlm.machine.environment import versions

MAX_NAMED, MISSING = 8, "missing"
# the packages that compute
PACKAGES = ("torch", "triton", "deepspeed")


def check_same_run(config: Config) -> None:
    """Raise UserError on all ranks if one has another configuration or other code than rank 0; collective."""
    if torch.distributed.get_world_size() == 1:
        return
    # a node may have its own copy of the token files, which are compared by their digests
    settings = {
        name: value
        for name, value in flatten(dataclasses.asdict(config)).items()
        if not (name.startswith("data.") and name.endswith("path"))
    }
    packages = {f"the version of {name}": version for name, version in versions().items() if name in PACKAGES}
    classes = {*targets(config.model).values(), config.optimizer._target_}
    files = {f"the file of {name}": digest([Path(inspect.getfile(get_class(name)))]) for name in sorted(classes)}
    _check_same({**settings, "the code of depthlm": digest(PACKAGE.rglob("*.py")), **packages, **files})


def check_same_corpus(corpus: Corpus) -> None:
    """Raise UserError on all ranks if one has other token files than rank 0, by their manifests; collective."""
    _check_same(
        {
            f"the digest of the token files of {name}": f"{manifest.digest()}, tokenizer {manifest.tokenizer}"
            for name, manifest in corpus.manifests.items()
        }
    )


def digest(files: Iterable[Path]) -> str:
    """Return the SHA-256 of files."""
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in sorted(files))).hexdigest()


def _check_same(here: Mapping[str, Any]) -> None:
    """Raise UserError with the differences if a rank has other values than rank 0."""
    if len(set(gather(hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()))) == 1:
        return
    (_, expected), *others = gather((socket.gethostname(), dict(here)))
    lines = [
        f"  - rank {rank} on {host}: {name} is {other.get(name, MISSING)}, and on rank 0 {expected.get(name, MISSING)}"
        for rank, (host, other) in enumerate(others, 1)
        for name in {**expected, **other}
        if other.get(name, MISSING) != expected.get(name, MISSING)
    ]
    more = [f"  - and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
    raise UserError(
        "\n".join(["the ranks would train different runs:", *lines[:MAX_NAMED], *more])
        + "\nStart all ranks with the same command, code and token files"
    )
