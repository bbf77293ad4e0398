"""Runs that start from a Hugging Face folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import depthlm
from depthlm.config import ConfigError
from depthlm.data import bytes_tokenizer
from depthlm.hugging_face import export
from depthlm.pretrained.folder import load_weights, read_pretrained
from depthlm.runs.records import read_metrics
from depthlm.training import train
from depthlm.training.checkpoint.init_from import copy_weights

pytestmark = pytest.mark.usefixtures("only_steps")
SIZE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
OURS = [
    "size.vocab_size=300", "size.hidden_size=48", "size.intermediate_size=80", "size.num_layers=3", "size.num_heads=4",
    "size.num_kv_heads=2", "size.head_size=16", "data.pad_vocab_multiple=1",
]  # fmt: skip


def classes(kind: str) -> tuple[Any, Any]:
    """Return the configuration and the model of a type of transformers, which takes seconds to import."""
    import transformers

    prefix = "".join(part.capitalize() for part in kind.split("_"))
    return getattr(transformers, f"{prefix}Config"), getattr(transformers, f"{prefix}ForCausalLM")


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder with transformers, with weights in at least two files."""

    def make(kind: str = "qwen3", shards: str = "100KB", **settings: Any) -> Path:
        config, model = classes(kind)
        torch.manual_seed(0)
        theirs = model(config(**SIZE | {"initializer_range": 0.3} | settings))
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 1.5)
        theirs.save_pretrained(tmp_path / kind, max_shard_size=shards)
        bytes_tokenizer().save(tmp_path / kind)
        return tmp_path / kind

    return make


@pytest.mark.parametrize(("kind", "tie"), [("qwen3", True), ("olmo2", False)])
def test_logits_equal_those_of_transformers(small_run, make_folder, kind, tie):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    folder = make_folder(kind, tie_word_embeddings=tie, rope_parameters=rope, attention_bias=True, rms_norm_eps=1e-6)
    assert len([*folder.glob("*.safetensors")]) > 1
    overrides = [
        f"backbone={kind}", f"backbone.tie_embeddings={tie}".lower(), "backbone.rope_theta=1e6",
        "backbone.attention_bias=true", "backbone.norm_eps=1e-6", f"init_from={folder}",
    ]  # fmt: skip
    model = depthlm.build_model(depthlm.compose(small_run(*OURS, *overrides)))
    assert copy_weights(load_weights(read_pretrained(folder)), model) == []
    theirs = classes(kind)[1].from_pretrained(folder)
    tokens = torch.arange(60).view(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_run_starts_from_a_folder_also_with_another_mechanism(small_run, make_folder, tmp_path, capsys):
    folder = make_folder("qwen3")
    overrides = [*OURS, "backbone.norm_eps=1e-6", f"init_from={folder}", "training.max_steps=1"]
    first = []
    for model in ("vanilla", "dca"):
        assert train(depthlm.compose(small_run(*overrides, f"model={model}", name=model))) == 0
        first.append(next(iter(read_metrics(tmp_path / model / "metrics.jsonl")))["loss"])
    output = capsys.readouterr().out
    assert f"weights imported from {folder}" in output
    assert "the weights are from model vanilla, this run trains dca" in output
    assert first[0] == pytest.approx(first[1], rel=1e-5)


def test_every_difference_is_reported_with_the_overrides_that_fix_it(small_run, make_folder):
    folder = make_folder("olmo2", tie_word_embeddings=True)
    for mechanism in ("vanilla", "mhc"):
        with pytest.raises(ConfigError, match=r"model\.loops=2: the weights have 1"):
            depthlm.compose(small_run(f"init_from={folder}", f"model={mechanism}", "model.loops=2"))
    with pytest.raises(ConfigError) as caught:
        depthlm.compose(small_run(f"init_from={folder}"))
    text = str(caught.value)
    assert "backbone.norm_placement=pre: the weights have post" in text
    assert "size.hidden_size=64: the weights have 48" in text
    fixes = text.rpartition("to start from these weights, give ")[2].split()
    assert {"backbone.tie_embeddings=true", "size.vocab_size=300", "data.pad_vocab_multiple=1"} <= {*fixes}
    assert depthlm.compose(small_run(f"init_from={folder}", *fixes)).backbone.qk_norm == "full"


def test_an_export_of_a_mechanism_has_its_settings(small_run, make_run, tmp_path):
    # dropout and the initial values do not change what the weights compute
    source = make_run(
        "model=moda", "model.attention.slots=3", "backbone.dropout=0.1", "backbone.init=truncated_normal", name="source"
    )
    folder = export(source, tmp_path / "export").folder
    with pytest.raises(ConfigError) as caught:
        depthlm.compose(small_run(f"init_from={folder}", "model=moda"))
    fixes = str(caught.value).rpartition("give ")[2].split()
    assert "model.attention.slots=3" in fixes
    assert not [fix for fix in fixes if fix.startswith("backbone")]
    model = depthlm.build_model(depthlm.compose(small_run(f"init_from={folder}", "model=moda", *fixes)))
    assert copy_weights(load_weights(read_pretrained(folder)), model) == []


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def link_out(folder: Path) -> None:
    """Move the weights out of the folder, and let the index name a link to them."""
    moved = (folder / "model.safetensors").rename(folder.parent / "moved.safetensors")
    (folder / "link.safetensors").symlink_to(moved)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "link.safetensors"}}))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "other type": (edit(model_type="llama"), "model_type llama; allowed: qwen3, olmo2, depthlm"),
    "rope of each layer type": (
        edit(
            layer_types=["full_attention", "chunked_attention", "full_attention"],
            rope_parameters={"full_attention": {"rope_theta": 1e4}, "chunked_attention": {"rope_theta": 1e6}},
        ),
        "several values of rope_theta .10000.0, 1000000.0., which is not supported",
    ),
    "window": (edit(use_sliding_window=True), "sliding-window attention, which is not supported"),
    "quantized": (edit(quantization_config={"bits": 4}), "quantized weights"),
    "not JSON": (lambda folder: (folder / "config.json").write_text("{"), "not the configuration of a model"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    "link": (link_out, "is not inside the folder"),
    "pickled": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
                r"its weights are pickled .* save_pretrained"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_unsupported_and_broken_folders_are_refused(small_run, make_folder, name):
    folder = make_folder("qwen3", shards="1GB")
    breaking, words = BROKEN[name]
    breaking(folder)
    with pytest.raises(ConfigError, match=words):
        depthlm.compose(small_run(*OURS, "backbone.norm_eps=1e-6", f"init_from={folder}"))


def test_rope_of_the_only_layer_type_is_read_as_transformers_reads_it(make_folder):
    from transformers import AutoConfig

    folder = make_folder("qwen3", layer_types=["full_attention"] * 3)
    edit(rope_parameters={"full_attention": {"rope_theta": 4e5, "rope_type": "default"}})(folder)
    theirs = AutoConfig.from_pretrained(folder).rope_parameters
    theirs = theirs.get("full_attention", theirs)
    source = read_pretrained(folder)
    assert (source.settings["backbone"]["rope_theta"], source.unsupported) == (theirs["rope_theta"], [])


@pytest.mark.parametrize("stored", ["another head", "only the head"])
def test_a_tied_head_is_what_the_weights_say(make_folder, stored):
    from transformers import AutoModelForCausalLM

    folder = make_folder("qwen3", shards="1GB", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (stored == "another head")
    if stored == "only the head":
        del weights["model.embed_tokens.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    source = read_pretrained(folder)
    assert source.settings["backbone"]["tie_embeddings"] == (stored != "another head")
    ours, theirs = load_weights(source), AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(ours["embedding.weight"], theirs.get_input_embeddings().weight)
    assert torch.equal(ours.get("head.weight", ours["embedding.weight"]), theirs.get_output_embeddings().weight)


def test_the_code_in_a_folder_does_not_run_and_resuming_does_not_need_the_folder(small_run, make_folder, tmp_path):
    folder = make_folder("qwen3")
    edit(auto_map=dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "intruder.Intruder"))(folder)
    (folder / "intruder.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'trace')!r})\nclass Intruder: pass\n")
    overrides = small_run(*OURS, "backbone.norm_eps=1e-6", f"init_from={folder}", "training.max_steps=2")
    assert train(depthlm.compose([*overrides, "training.stop_after=1"])) == 0
    shutil.rmtree(folder)
    assert train(depthlm.compose(overrides)) == 0
    assert not (tmp_path / "trace").exists()
