"""An export, loaded in a process without depthlm, computes and generates the same as the run."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

import depthlm
from depthlm.data import Tokenizer
from depthlm.evaluation.generation import generate
from depthlm.hugging_face import export
from depthlm.model import Decoder
from depthlm.pretrained.folder import load_weights, read_pretrained
from depthlm.training.checkpoint.init_from import copy_weights

from ..model.conftest import PRESETS
from .conftest import write_run

NATIVE = {
    "vanilla": [],
    "vanilla, tied": ["backbone.tie_embeddings=true", "backbone.attention_bias=true"],
    "vanilla, olmo2": ["backbone=olmo2", "backbone.norm_eps=1e-6", "backbone.rope_theta=500000"],
    "vanilla, experts": ["backbone=qwen3_moe"],
    "vanilla, kimi": ["backbone=kimi_linear", "size.num_layers=4"],
}
OTHERS = {
    "moda, olmo2": ["model=moda", "backbone=olmo2"],
    "mhc, lm1b": ["model=mhc", "backbone=lm1b"],
    "vanilla, lm1b, odd width": ["backbone=lm1b", "size.hidden_size=33"],
    "vanilla, loops": ["model.loops=2"],
    "moda, loops": ["model=moda", "model.loops=2"],
    "dca, documents": ["model=dca", "data.document_mask=true"],
    "vanilla, documents": ["data.document_mask=true"],
    "moda, experts": ["model=moda", "backbone=qwen3_moe", "backbone.router_bias_rate=0.01"],
    "vanilla, shared experts": ["backbone=olmoe", "backbone.shared_experts=1", "backbone.dense_layers=1"],
    "depth_attention, kimi, documents": [
        "model=depth_attention",
        "backbone=kimi_linear",
        "backbone.mixers=[delta,latent]",
        "size.num_layers=4",
        "data.document_mask=true",
    ],
    "vanilla, kimi, one expert": [
        "backbone=kimi_linear",
        "size.num_layers=4",
        "size.num_experts=1",
        "size.experts_per_token=1",
    ],
    "vanilla, kimi, one expert per group": [
        "backbone=kimi_linear",
        "size.num_layers=4",
        "size.num_experts=4",
        "backbone.router_groups=4",
        "backbone.router_groups_kept=4",
    ],
    "vanilla, only delta": ["backbone=kimi_linear", "backbone.mixers=[delta]"],
    "moda, delta, loops": ["model=moda", "backbone.mixers=[delta,attention]", "size.num_layers=3", "model.loops=2"],
    "pair": ["model/connection=mhc", "model/attention=depth_attention"],
}
# mechanisms that the other cases have
COVERED = {"vanilla", "dca", "depth_attention", "mhc", "moda"}
CASES = {name: [f"model={name}"] for name in PRESETS if name not in COVERED} | NATIVE | OTHERS
CASES |= {f"{name}, kimi": [f"model={name}", "backbone=kimi_linear", "size.num_layers=3"] for name in ("mhc", "moda")}
OWN, EDITED = "of a reader", "of a reader, edited since"
# in the default suite: a native type, a connection, an attention, and a mechanism of a reader
DEFAULT = {"vanilla, olmo2", "dca, documents", "moda, loops", "depth_attention, kimi, documents", OWN, EDITED}
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
        if EDITED in wanted:
            runs[EDITED] = write_run(root / "edited", "model/connection=own", config_dir=str(root / "conf"))
        for name, run in runs.items():
            trust = ["own_mechanism"] if name in (OWN, EDITED) else []
            if name == EDITED:
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


@pytest.fixture(params=marked([*CASES, OWN, EDITED]))
def case(cases: dict[str, Case], request: pytest.FixtureRequest) -> Case:
    return cases[request.param]


def test_logits_and_loss_equal_those_of_the_run(case: Case) -> None:
    model, answer, tokens = case.model, case.answer, case.tokens
    with torch.no_grad():
        logits, sums = model(tokens), model(tokens[:, :-1], tokens[:, 1:])
    assert (torch.tensor(answer["logits"]) - logits).abs().max() <= 1e-5
    assert (torch.tensor(answer["kept"]) - logits[:, -2:]).abs().max() <= 1e-5
    assert answer["loss"] == pytest.approx(float(sums.nll / sums.tokens), rel=1e-5)


def test_greedy_generation_equals_the_run_also_with_padded_prompts(case: Case) -> None:
    model, answer, tokens = case.model, case.answer, case.tokens
    vocab_size = Tokenizer.load(case.folder).vocab_size
    assert vocab_size < model.size.vocab_size
    expected = generate(model, tokens, 6, vocab_size=vocab_size)[:, tokens.shape[1] :].tolist()
    assert answer["greedy"] == answer["uncached"] == expected
    alone = [
        generate(model, row[None, :n], 6, vocab_size=vocab_size)[0, n:]
        for row, n in zip(tokens, answer["lengths"], strict=True)
    ]
    assert answer["padded"] == [row.tolist() for row in alone]


def test_beam_search_gives_the_same_with_and_without_cache(case: Case) -> None:
    cached, uncached = case.answer["beams"]
    assert cached == uncached
    assert case.answer["sampled"] == [6, 18]


def test_the_tokenizer_equals_that_of_the_run(case: Case) -> None:
    ours = Tokenizer.load(case.folder)
    assert case.answer["ids"] == ours.encode_batch(TEXTS)
    assert case.answer["ends"] == [256, 257]
    assert case.answer["length"] == 32


def test_an_export_can_be_read_back_unchanged(case: Case) -> None:
    weights = load_weights(read_pretrained(case.folder))
    assert copy_weights(weights, case.model) == []
    state = case.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param("vanilla", "qwen3"),
        pytest.param("vanilla, olmo2", "olmo2"),
        pytest.param("vanilla, tied", "qwen3", marks=pytest.mark.slow),
    ],
    indirect=["case"],
)
def test_vanilla_is_exported_as_a_transformers_model(case: Case, kind: str) -> None:
    assert (case.answer["model_type"], case.answer["class"]) == (kind, f"{kind.capitalize()}ForCausalLM")
    assert not [*case.folder.glob("*.py")]


@pytest.mark.parametrize("case", marked(OTHERS), indirect=True)
def test_other_models_are_exported_with_their_code(case: Case) -> None:
    assert case.answer["class"] == "DepthLMForCausalLM"
    assert [*case.folder.glob("modeling_*.py")]


@pytest.mark.parametrize("case", [OWN], indirect=True)
def test_only_the_code_that_a_mechanism_needs_is_exported(case: Case) -> None:
    files = {file.name for file in case.folder.glob("*.py")}
    assert {"own_mechanism_own_connection.py", "own_mechanism_own_scale.py"} <= files
    assert not any("moda" in file or "config" in file.removesuffix("configuration.py") for file in files)
