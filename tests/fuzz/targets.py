"""The files that are damaged, and what reads each of them."""

import contextlib
import gzip
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from safetensors.torch import load_file

import depthlm
from depthlm.config.saved import load_config
from depthlm.data import Manifest, Tokenizer, bytes_tokenizer, open_corpus, prepare, verify
from depthlm.data.corpora.documents import Reader
from depthlm.data.corpora.sources import TextFile
from depthlm.data.preparation.imported import Import, import_tokens
from depthlm.data.settings import Data
from depthlm.evaluation.generation import _lines
from depthlm.files import read_json
from depthlm.hugging_face import export
from depthlm.hugging_face.card import corpus, version_of
from depthlm.hugging_face.folder import check_folder
from depthlm.pretrained.folder import load_weights, read_pretrained
from depthlm.runs.checkpoints import missing_part, newest_checkpoint
from depthlm.runs.directory import read_summary
from depthlm.runs.listing import list_runs
from depthlm.runs.loss_curve import plot_loss
from depthlm.runs.progress import progress_of
from depthlm.runs.records import read_run
from depthlm.slurm.cluster import _settings, _tasks
from depthlm.training import train
from depthlm.training.monitoring.metrics import MetricsFile

RUN = ["size=micro", "size.hidden_size=16", "size.head_size=8", "size.intermediate_size=16", "size.num_layers=1",
       "data=local", "data.tokenizer=bytes", "tracker=none", "precision=fp32", "device=cpu", "training.batch_size=2",
       "training.sequence_length=32", "training.max_steps=4", "training.checkpoint_every=2", "training.log_every=1",
       "training.validate_every=2", "training.validation_tokens=64", "training.sample=null",
       "training.log_blocks_every=2", "backbone=qwen3_moe", "size.num_experts=4", "memory=ignore"]  # fmt: skip


@dataclass
class Target:
    """A file, and what reads it. exact: whether everything that is read of it is covered by a digest."""

    name: str
    file: Path
    read: Callable[[Path], Any]
    exact: bool = False
    commands: tuple[tuple[str, ...], ...] = ()


def make_targets(folder: Path) -> list[Target]:
    """Write a run, its token files, texts and a Hugging Face folder, and return the files with their readers."""
    text = folder / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number:02d}.txt").write_text(f"document {number} of a small corpus\n" * 20)
    run = folder / "run"
    overrides = [*RUN, f"data.source={text}", f"data.path={folder}/tokens"]
    assert train(depthlm.compose([*overrides, f"output_dir={run}"])) == 0
    (run / "evaluation.json").write_text(json.dumps({"step": 4, "validation/local/loss": 2.0, "piqa/acc": 0.5}))
    (run / "failure.json").write_text(json.dumps({"time": "", "error": "an error"}))
    return [
        *of_run(run, overrides),
        *of_tokens(folder, text),
        *of_texts(folder),
        *of_pretrained(folder, run),
        *of_arguments(folder),
    ]


def of_run(run: Path, overrides: list[str]) -> list[Target]:
    """Return the files of a run directory."""
    python, checkpoint = ("-m", "depthlm"), run / "checkpoints/step-00000004"
    loading = (
        (*python, "generate", f"run={run}", "prompt=a", "max_new_tokens=2"),
        (*python, "runs", "--root", str(run.parent)),
    )
    resuming = (("train.py", *overrides, f"output_dir={run}"), (*python, "report", str(run), f"to={run}-report"))

    def newest(_: Path) -> Any:
        newest_valid = newest_checkpoint(run)
        missing_part(run, 4)
        return None if newest_valid is None else newest_valid[1].step in (2, 4)

    def records(_: Path) -> Any:
        record = read_run(run)
        for metric in ("validation_loss", "training_perplexity", "piqa/acc"):
            record.number(metric)
            record.number(metric, at=0.5)
        return list_runs(run.parent)

    def summary(_: Path) -> Any:
        return read_summary(run), records(_)

    def decoded(_: Path) -> Any:
        return Tokenizer.load(run).decode([1, 2])

    def rows(file: Path) -> Any:
        records(file)
        plot_loss(run)
        copy = shutil.copy(file, file.with_suffix(".copy"))
        return MetricsFile(Path(copy), 4).last

    saved = [load_file(run / f"checkpoints/step-{step:08d}/model.safetensors") for step in (2, 4)]

    def weights(_: Path) -> Any:
        loaded = depthlm.load(run)[0].state_dict()
        return any(all(torch.equal(loaded[name], tensors[name]) for name in tensors) for tensors in saved)

    def environment(_: Path) -> Any:
        recorded = read_json(run / "environment.json")
        return progress_of(read_run(run)).texts(), corpus(load_config(run), recorded), version_of(recorded)

    def configuration(_: Path) -> Any:
        list_runs(run.parent)
        config = load_config(run)
        depthlm.compose([f"run={run}"])
        return asdict(config)

    return [
        Target("config.yaml", run / "config.yaml", configuration, True, (*loading, *resuming)),
        Target("manifest.json", checkpoint / "manifest.json", newest, True, (*loading, *resuming)),
        Target("model.safetensors", checkpoint / "model.safetensors", weights, True, loading[:1]),
        Target("states.pt", next((checkpoint / "deepspeed").glob("*.pt")), newest, True, resuming[:1]),
        Target("metrics.jsonl", run / "metrics.jsonl", rows, False, resuming),
        Target("blocks.jsonl", run / "blocks.jsonl", rows, False, resuming[:1]),
        Target("experts.jsonl", run / "experts.jsonl", rows, False, resuming[:1]),
        Target("summary.json", run / "summary.json", summary, False, (*loading, *resuming)),
        Target("environment.json", run / "environment.json", environment, False, loading[1:]),
        Target("evaluation.json", run / "evaluation.json", records, False, resuming[1:]),
        Target("failure.json", run / "failure.json", records, False, loading[1:]),
        Target("tokenizer.json", run / "tokenizer.json", decoded, False, loading[:1]),
    ]


def of_tokens(folder: Path, text: Path) -> list[Target]:
    """Return the files of prepared token files, and of a preparation in progress."""
    tokens = folder / "tokens"
    data = Data(name="local", source=str(text), tokenizer="bytes", path=str(tokens))
    partial = folder / "begun.partial"
    begun = Data(name="local", source=str(text), tokenizer="bytes", path=str(folder / "begun"), shard_tokens=500)

    def corpus(_: Path) -> Any:
        opened = open_corpus(data)
        return [int(files.read(0, len(files)).sum()) for files in (*opened.train.values(), *opened.validation.values())]

    def verified(_: Path) -> Any:
        verify(tokens)
        return corpus(_)

    with mock.patch("depthlm.data.preparation.prepare.publish"):
        prepare(begun)
    # killed after the last complete shard
    (partial / "manifest.json").unlink()
    kept = shutil.copytree(partial, folder / "kept")

    def resumed(_: Path) -> Any:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(folder / "begun", ignore_errors=True)
        shutil.copytree(kept, partial)
        with contextlib.redirect_stderr(io.StringIO()):
            return Manifest.read(prepare(begun)["local"]).digest()

    checking = ("data/prepare.py", "data=local", f"data.source={text}", "data.tokenizer=bytes", f"data.path={tokens}")
    return [
        Target("tokens/manifest.json", tokens / "manifest.json", corpus, False, (checking, (*checking, "--verify"))),
        Target("tokens/train-00000.bin", tokens / "train-00000.bin", verified, True, ((*checking, "--verify"),)),
        Target("tokens/tokenizer.json", tokens / "tokenizer.json", corpus, True, (checking,)),
        Target("progress.json", kept / "progress.json", resumed, True),
    ]


def of_texts(folder: Path) -> list[Target]:
    """Return texts in each format."""
    lines = b"".join(json.dumps({"text": f"document {n} é", "n": n}).encode() + b"\n" for n in range(50))
    contents = {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.zst": pa.compress(lines, codec="zstd", asbytes=True),
        "a.txt": lines,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    pyarrow.parquet.write_table(pa.table({"text": [f"document {n}" for n in range(50)]}), folder / "a.parquet")

    def read(file: Path) -> Any:
        reader = Reader(TextFile(file.name, str(file)), "text", file.suffix == ".txt")
        return [record.bad for record in reader.records()]

    return [
        Target(name, folder / name, read, False, (("data/prepare.py", "data=local", f"data.source={folder / name}",
               "data.tokenizer=bytes", f"data.path={folder}/of-{name}"),))
        for name in (*contents, "a.parquet")
    ]  # fmt: skip


def of_pretrained(folder: Path, run: Path) -> list[Target]:
    """Return the files of an export as a Hugging Face folder, with an index of its weights."""
    exported = export(run, folder / "export").folder
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def read(_: Path) -> Any:
        return sorted(load_weights(read_pretrained(exported)))

    def replaced(_: Path) -> Any:
        # an export into the folder of another one looks first at what is there
        return check_folder(exported)

    readers = dict.fromkeys(("config.json", "model.safetensors.index.json", "model.safetensors"), read)
    readers["tokenizer_config.json"] = lambda _: Tokenizer.load(exported).end
    readers |= dict.fromkeys(("depthlm.json", "README.md"), replaced)
    return [Target(f"export/{name}", exported / name, reader) for name, reader in readers.items()]


def of_arguments(folder: Path) -> list[Target]:
    """Return files that arguments name: ids, prompts, and what `submit` reads."""
    np.save(folder / "ids.npy", np.array([*b"one", 256, *b"two", 256] * 20, "<u4"))
    (folder / "prompts").write_text("one\ntwo\n")
    (folder / "cluster.yaml").write_text("account: mine\npartition: [a, b]\n")
    (folder / "sweeps/one").mkdir(parents=True)
    (folder / "sweeps/one/jobs.jsonl").write_text(json.dumps({"job": "12", "directories": ["a", "b"]}) + "\n")
    tokenizer = bytes_tokenizer()

    def imported(file: Path) -> Any:
        shutil.rmtree(folder / "imported", ignore_errors=True)
        shutil.rmtree(folder / "imported.partial", ignore_errors=True)
        return import_tokens(Import([file], None, tokenizer, folder / "imported", 0.5)).train.tokens

    importing = ("data/prepare.py", "--import-tokens", str(folder / "ids.npy"), "--tokenizer", "bytes", "--to",
                 str(folder / "imported"))  # fmt: skip
    return [
        Target("ids.npy", folder / "ids.npy", imported, False, (importing,)),
        Target("prompts", folder / "prompts", _lines),
        Target("cluster.yaml", folder / "cluster.yaml", _settings),
        Target("jobs", folder / "sweeps/one/jobs.jsonl", lambda _: len(_tasks([folder / "sweeps"]))),
    ]
