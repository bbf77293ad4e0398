"""An export, loaded in a process without depthlm, computes and generates the same as the run."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

import depthlm
from depthlm.data import Tokenizer
from depthlm.hugging_face import export
from depthlm.locations import CONF
from depthlm.model import Decoder
from depthlm.model.generation import generate
from depthlm.pretrained.folder import load_weights, read_pretrained
from depthlm.training.checkpoint.init_from import copy_weights

from .conftest import write_run

NATIVE = {
    "vanilla": [],
    "vanilla, tied": ["backbone.tie_embeddings=true", "backbone.attention_bias=true"],
    "vanilla, olmo2": ["backbone=olmo2", "backbone.norm_eps=1e-6", "backbone.rope_theta=500000"],
}
OTHERS = {
    "odd width": ["backbone=lm1b", "size.hidden_size=33"],
    "loops, documents": ["model.loops=2", "data.document_mask=true"],
    "shared experts": ["backbone=olmoe", "backbone.shared_experts=1", "backbone.dense_layers=1"],
    "vanilla, kimi": ["backbone=kimi_linear", "size.num_layers=4"],
    "delta and attention": ["model=moda", "backbone.mixers=[delta,attention]", "size.num_layers=3", "model.loops=2"],
}  # fmt: skip
# each connection with one of the attentions, on one of the backbones, with or without a mask
FILES = {
    part: sorted(path.stem for path in (CONF / "model" / part).glob("*.yaml")) for part in ("connection", "attention")
}
BACKBONES = [
    ["backbone=olmo2"], ["backbone=lm1b", "data.document_mask=true"], ["backbone=moda_layers"],
    ["backbone=qwen3_moe", "backbone.router_bias_rate=0.01", "data.document_mask=true"],
    ["backbone=kimi_linear", "backbone.mixers=[delta,latent]", "data.document_mask=true"], ["backbone=qwen3"],
]  # fmt: skip
MECHANISMS = {
    connection: [
        f"model/connection={connection}", f"model/attention={attention}", "size.num_layers=4", *backbone,
    ]
    for connection, attention, backbone in zip(FILES["connection"], cycle(FILES["attention"]), cycle(BACKBONES))
}  # fmt: skip
CASES = NATIVE | OTHERS | MECHANISMS
OWN = "of a reader, edited since"
# in the default suite; test_pretrained.py has a native type there
DEFAULT = {OWN}
TEXTS = ["the depth", "a<|endoftext|>b", "naïve"]
PARTS = {
    "connection": '''"""A connection in two files."""

from torch import Tensor

from depthlm.model.connection import Connection

from .own_scale import scale


class OwnConnection(Connection):
    def __init__(self, spec, size, backbone, factor: float = 0.5):
        super().__init__(spec, size, backbone)
        self.factor = factor

    def read(self, stream: list[Tensor]):
        return (scale(stream[0], self.factor),), None

    def write(self, stream, output_btd, carry):
        return [stream[0] + output_btd]
''',
    "scale": '''"""What it uses."""

import math


def scale(x, factor):
    return x * math.sqrt(factor)
''',
}


class Case(NamedTuple):
    model: Decoder
    folder: Path
    answer: dict[str, Any]
    tokens: torch.Tensor


def marked(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters, of which only those in DEFAULT are in the default suite."""
    return [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Export every case that a selected test needs, and load all of them in one separate process."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    wanted = {item.callspec.params["case"] for item in items if item.path == request.path}
    root = tmp_path_factory.mktemp("exports")
    own, conf = root / "own_mechanism", root / "conf/model/connection"
    own.mkdir()
    conf.mkdir(parents=True)
    (own / "__init__.py").touch()
    for name, text in PARTS.items():
        (own / f"own_{name}.py").write_text(text)
    (conf / "own.yaml").write_text(yaml.dump({"_target_": "own_mechanism.own_connection.OwnConnection", "factor": 2.0}))
    sys.path.insert(0, str(root))
    try:
        runs = {name: write_run(root / f"run-{i}", *CASES[name]) for i, name in enumerate(CASES) if name in wanted}
        if OWN in wanted:
            runs[OWN] = write_run(root / "own", "model/connection=own", config_dir=str(root / "conf"))
        models, requests = {}, {}
        tokens = torch.randint(0, 256, (3, 14), generator=torch.Generator().manual_seed(0))
        tokens[:, 4], tokens[0, 9] = 256, 256
        for name, run in runs.items():
            trust = ["own_mechanism"] if name == OWN else []
            if name == OWN:
                (own / "own_scale.py").write_text(PARTS["scale"].replace("sqrt(factor)", "sqrt(factor) / 3"))
                for module in [module for module in sys.modules if module.startswith("own_mechanism")]:
                    del sys.modules[module]
                importlib.invalidate_caches()
            # the same folder name for all, which one process loads
            written = export(run, root / "exports" / run.name / "export", trust)
            assert written.native == (name in NATIVE)
            models[name] = depthlm.load(run, trust=trust)[0]
            requests[name] = {
                "folder": str(written.folder), "remote": not written.native, "tokens": tokens.tolist(), "texts": TEXTS,
            }  # fmt: skip
    finally:
        sys.path.remove(str(root))
    (root / "requests.json").write_text(json.dumps(requests))
    script = Path(__file__).with_name("outside.py")
    done = subprocess.run(
        [sys.executable, "-I", script, root / "requests.json", root / "answers.json"], capture_output=True, text=True,
        cwd=root, env={"HOME": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads((root / "answers.json").read_text())
    return {name: Case(models[name], Path(requests[name]["folder"]), answers[name], tokens) for name in runs}


@pytest.fixture(params=marked([*CASES, OWN]))
def case(cases: dict[str, Case], request: pytest.FixtureRequest) -> Case:
    return cases[request.param]


def test_an_export_computes_and_generates_what_the_run_does(case):
    model, answer, tokens = case.model, case.answer, case.tokens
    with torch.no_grad():
        logits, sums = model(tokens), model(tokens[:, :-1], tokens[:, 1:])
    assert (torch.tensor(answer["logits"]) - logits).abs().max() <= 1e-5
    assert (torch.tensor(answer["kept"]) - logits[:, -2:]).abs().max() <= 1e-5
    assert answer["loss"] == pytest.approx(float(sums.nll / sums.tokens), rel=1e-5)
    tokenizer = Tokenizer.load(case.folder)
    assert (answer["ids"], answer["ends"], answer["length"]) == (tokenizer.encode_batch(TEXTS), [256, 257], 32)
    assert tokenizer.vocab_size < model.size.vocab_size
    expected = generate(model, tokens, 4, vocab_size=tokenizer.vocab_size)[:, tokens.shape[1] :].tolist()
    assert answer["greedy"] == answer["uncached"] == expected
    alone = [
        generate(model, row[None, :n], 4, vocab_size=tokenizer.vocab_size)[0, n:].tolist()
        for row, n in zip(tokens, answer["lengths"], strict=True)
    ]
    assert answer["padded"] == alone
    cached, uncached = answer["beams"]
    assert cached == uncached

    in_fp32 = {name.partition(".")[2] for name in answer["fp32"]}
    assert in_fp32 == {name for name in model.state_dict() if name.rpartition(".")[2] in ("bias_e", "A_log", "dt_bias")}
    assert answer["finite"]

    weights = load_weights(read_pretrained(case.folder))
    assert copy_weights(weights, model) == []
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    files = {file.name for file in case.folder.glob("*.py")}
    assert (answer["class"] == "DepthLMForCausalLM") == any(name.startswith("modeling_") for name in files)

    # only the code that the mechanism needs
    if case.folder.parent.name == "own":
        assert {"own_mechanism_own_connection.py", "own_mechanism_own_scale.py"} <= files
        assert not any("moda" in file or "config" in file.removesuffix("configuration.py") for file in files)
