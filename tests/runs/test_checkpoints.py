"""A checkpoint is used only if it is valid and belongs to the run."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file

import depthlm
from depthlm.config import Config
from depthlm.config.saved import config_text
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.run_directory import RunDirectory
from depthlm.runs.checkpoints import missing_part, newest_checkpoint, prune, read_manifest
from depthlm.runs.manifest import CheckpointError, parse_manifest, seal
from depthlm.training.checkpoint.saving import Saver
from depthlm.training.engine import build_engine
from depthlm.training.plan import make_plan


@pytest.fixture(scope="module")
def config(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The configuration of a run of a model with tied embeddings."""
    overrides = [
        "size=micro", "data=local", f"data.source={corpus_folder}", "data.tokenizer=bytes", "tracker=none",
        "precision=fp32", "training.batch_size=4", "training.sequence_length=32", "training.max_steps=20",
        "backbone.tie_embeddings=true", "training.keep_last=3", f"output_dir={tmp_path_factory.mktemp('written')}",
    ]  # fmt: skip
    return depthlm.compose(overrides)


@pytest.fixture(scope="module")
def written(config: Config) -> Path:
    """A run directory with checkpoints of steps 1 and 2, which no test may change."""
    start_distributed(ranks())
    engine = build_engine(config, make_plan(config, ranks()), depthlm.build_model(config))
    directory = Path(config.output_dir or "")
    (directory / "config.yaml").write_text(config_text(config))
    about = {"corpus": "c", "world_size": 1, "stage": 0, "experts": 1, "config": asdict(config)}
    saver = Saver(engine, directory, config.training, about)
    for step in (1, 2):
        saver.save({"step": step, "skipped": [7]}, last=False)
    return directory


@pytest.fixture
def saved(written: Path, tmp_path: Path) -> Path:
    """A copy of that run directory."""
    return shutil.copytree(written, tmp_path / "run")


def newest(directory: Path) -> str:
    checkpoint = newest_checkpoint(directory)
    assert checkpoint is not None
    return checkpoint[0].name


def test_the_manifest_lists_every_file_and_may_differ_from_the_run_in_changeable_settings(saved, config):
    others = replace(config.training, max_steps=77, micro_batch_size=1, log_every=3)
    (saved / "config.yaml").write_text(config_text(replace(config, training=others)))
    checkpoint = newest_checkpoint(saved)
    assert checkpoint is not None
    path, manifest = checkpoint
    assert path.name == (saved / "checkpoints/latest").read_text().strip() == "step-00000002"
    assert (manifest.step, manifest.skipped) == (2, [7])
    on_disk = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {"manifest.json"}
    assert set(manifest.files) == on_disk == {"model.safetensors", "deepspeed/mp_rank_00_model_states.pt"}
    # without the head, which is tied
    assert "head.weight" not in load_file(path / "model.safetensors")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _of_another_run(path: Path) -> None:
    manifest = json.loads(path.read_text())
    manifest["config"]["optimizer"]["lr"] = 0.5
    path.write_text(json.dumps(seal(manifest)))


def _without_ranks(path: Path) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(seal({name: manifest[name] for name in manifest if name != "world_size"})))


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("model.safetensors", _truncate, "model.safetensors is not what was saved"),
        ("model.safetensors", _flip, "is not what was saved"),
        ("model.safetensors", Path.unlink, "is missing"),
        ("deepspeed/mp_rank_00_model_states.pt", _flip, "is not what was saved"),
        ("deepspeed/mp_rank_00_model_states.pt", Path.unlink, "is missing"),
        ("deepspeed/zero_pp_rank_0_mp_rank_00_optim_states.pt", Path.touch, "is not listed in its manifest.json"),
        ("manifest.json", Path.unlink, r"no readable manifest\.json"),
        ("manifest.json", _truncate, r"no readable manifest\.json"),
        ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe"), r"no readable manifest\.json"),
        ("manifest.json", lambda path: path.write_text("[]"), r"no readable manifest\.json"),
        ("manifest.json", lambda path: path.write_text("{}"), r"no readable manifest\.json"),
        ("manifest.json", _without_ranks, r"manifest\.json lacks world_size"),
        ("manifest.json", _of_another_run, r"belongs to another run \(optimizer\.lr differs\)"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(saved, file, damage, words, caplog):
    damage(saved / "checkpoints/step-00000002" / file)
    with caplog.at_level("WARNING", logger="depthlm"):
        assert newest(saved) == "step-00000001"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{saved}/checkpoints/step-00000002: ")
    assert re.search(words, caplog.messages[0])


def test_prune_retains_the_last_the_multiples_and_the_newest_regular_checkpoint(tmp_path):
    for number, (keep_last, keep_every, checkpoint_every, kept) in enumerate(
        ((2, None, 10, [30, 33, 35]), (1, 10, 5, [10, 20, 30, 35]), (9, None, 1, [10, 12, 20, 30, 33, 35]))
    ):
        run = RunDirectory(tmp_path / str(number))
        # 40 is beyond the newest: it was rejected as damaged
        for step in (10, 12, 20, 30, 33, 35, 40):
            run.checkpoint(step).mkdir(parents=True)
        (run.staging(33) / "deepspeed").mkdir(parents=True)
        newest = run.checkpoint(35)
        prune(run.path, newest, keep_last=keep_last, keep_every=keep_every, checkpoint_every=checkpoint_every)
        assert sorted(run.checkpoints.iterdir()) == [run.checkpoint(step) for step in kept]


def test_a_manifest_of_another_format_is_refused(saved):
    file = RunDirectory(saved).checkpoint(1) / "manifest.json"
    manifest = json.loads(file.read_text())
    assert manifest["format_version"] == 2
    for version in (1, 3, "2", None):
        file.write_text(json.dumps(seal(manifest | {"format_version": version})))
        with pytest.raises(CheckpointError, match=f"format version {version}, and this depthlm reads version 2"):
            read_manifest(file.parent)


WRONG: list[tuple[str, object, str]] = [
    ("step", "2", "a whole number from 0"),
    ("step", True, "a whole number from 0"),
    ("step", -5, "a whole number from 0"),
    ("step", 12, "is of step 12"),
    ("world_size", 0, "a whole number above 0"),
    ("stage", 4, "0, 1, 2 or 3"),
    ("corpus", None, "a text"),
    ("config", [], "an object"),
    ("files", ["model.safetensors"], "an object of file names"),
    ("files", {"model.safetensors": "0"}, "an object of file names"),
    ("skipped", 7, "a list of steps"),
    ("rewound", [[1]], "a list of pairs of steps"),
    ("recent_losses", [None], "a list of numbers"),
    ("wall_seconds", float("nan"), "a number from 0"),
    ("wandb_id", 1, "a text or null"),
    ("spikes", -1, "a whole number from 0 or null"),
]


def test_a_value_of_a_wrong_type_and_any_other_content_are_reported(saved):
    checkpoint = RunDirectory(saved).checkpoint(2)
    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    for name, value, wanted in WRONG:
        file.write_text(json.dumps(seal(manifest | {name: value})))
        with pytest.raises(CheckpointError, match=wanted):
            read_manifest(checkpoint)
    for text in (file.read_text(), "[" * 100000, '{"a":' * 100000, "null", "1e999", '{"files": {}}'):
        file.write_text(text)
        assert newest(saved) == "step-00000001"
        assert missing_part(saved, 2) is not None


def test_every_flipped_bit_of_a_manifest_is_noticed(saved):
    file = RunDirectory(saved).checkpoint(2) / "manifest.json"
    content, original = file.read_bytes(), parse_manifest(file.parent)
    for bit in Random(0).sample(range(8 * len(content)), 300):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            assert parse_manifest(file.parent) == original
        except CheckpointError:
            continue


def test_folders_that_a_user_has_named_are_left_alone(saved):
    run = RunDirectory(saved)
    kept = [run.checkpoints / name for name in ("step-00000002-good", "step-2", "step-best", "step-0000000২")]
    for copy in kept:
        shutil.copytree(run.checkpoint(2), copy)
    assert newest(saved) == "step-00000002"
    prune(saved, run.checkpoint(2), keep_last=1, keep_every=None, checkpoint_every=1)
    assert sorted(run.checkpoints.iterdir()) == sorted([*kept, run.latest, run.checkpoint(2)])
    assert read_manifest(kept[0]).step == 2


def test_a_run_without_a_valid_checkpoint_does_not_start_from_scratch(saved):
    assert newest_checkpoint(saved / "none") is None
    assert read_manifest(saved / "checkpoints/step-00000001").step == 1
    for path in (saved / "checkpoints").glob("step-*"):
        _truncate(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint in it is valid .* resume=retrain"):
        newest_checkpoint(saved)
