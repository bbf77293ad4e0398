"""A checkpoint is whole and this run's, or it is none."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

import depthlm
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.runs.checkpoints import CheckpointError, newest_checkpoint, prune, read_manifest
from depthlm.training.checkpoint.saving import Saver
from depthlm.training.engine.deepspeed import build_engine
from depthlm.training.plan import make_plan


@pytest.fixture
def config(small_run: Callable[..., list[str]]) -> Config:
    """Of a tied model, whose run directory is the test's folder."""
    return depthlm.compose(small_run("backbone.tie_embeddings=true", "training.keep_last=3"))


@pytest.fixture
def saver(config: Config, tmp_path: Path) -> Saver:
    """Of a fresh engine."""
    start_distributed(ranks())
    engine = build_engine(config, make_plan(config, ranks()), depthlm.build_model(config))
    OmegaConf.save(OmegaConf.structured(config), tmp_path / "config.yaml")
    about = {"corpus": "c", "world_size": 1, "stage": 0, "config": asdict(config)}
    return Saver(engine, tmp_path, config.training, about)


@pytest.fixture
def saved(saver: Saver, tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        saver.save({"step": step, "skipped": [7]}, last=False)
    return tmp_path


def newest(directory: Path) -> str:
    found = newest_checkpoint(directory)
    assert found is not None
    return found[0].name


def test_the_manifest_holds_the_state_and_every_file(saved: Path) -> None:
    found = newest_checkpoint(saved)
    assert found is not None
    path, manifest = found
    assert path.name == (saved / "checkpoints/latest").read_text().strip() == "step-00000002"
    assert (manifest["step"], manifest["skipped"]) == (2, [7])
    on_disk = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == on_disk == {"model.safetensors", "deepspeed/mp_rank_00_model_states.pt"}


def test_the_weights_are_readable_by_safetensors_alone(saved: Path) -> None:
    weights = load_file(saved / "checkpoints/step-00000002/model.safetensors")
    assert "head.weight" not in weights
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _of_another_run(path: Path) -> None:
    manifest = json.loads(path.read_text())
    manifest["config"]["optimizer"]["lr"] = 0.5
    path.write_text(json.dumps(manifest))


def _without_ranks(path: Path) -> None:
    manifest = json.loads(path.read_text())
    del manifest["world_size"]
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("model.safetensors", _truncate, "model.safetensors is not what was saved"),
        ("model.safetensors", _flip, "is not what was saved"),
        ("model.safetensors", Path.unlink, "is missing"),
        ("deepspeed/mp_rank_00_model_states.pt", _flip, "is not what was saved"),
        ("deepspeed/mp_rank_00_model_states.pt", Path.unlink, "is missing"),
        ("deepspeed/zero_pp_rank_0_mp_rank_00_optim_states.pt", Path.touch, "nobody vouches for it"),
        ("manifest.json", Path.unlink, r"no readable manifest\.json"),
        ("manifest.json", _truncate, r"no readable manifest\.json"),
        ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe"), r"no readable manifest\.json"),
        ("manifest.json", lambda path: path.write_text("[]"), r"no readable manifest\.json"),
        ("manifest.json", lambda path: path.write_text("{}"), r"no readable manifest\.json"),
        ("manifest.json", _without_ranks, r"manifest\.json lacks world_size"),
        ("manifest.json", _of_another_run, r"another run's \(optimizer\.lr differs\)"),
    ],
)
def test_damage_is_told_and_the_one_before_is_taken(
    saved: Path, file: str, damage: Callable[[Path], object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(saved / "checkpoints/step-00000002" / file)
    with caplog.at_level("WARNING", logger="depthlm"):
        assert newest(saved) == "step-00000001"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{saved}/checkpoints/step-00000002: ")
    assert re.search(words, caplog.messages[0])


def test_a_checkpoint_may_differ_from_the_run_in_what_may_change(saved: Path, config: Config) -> None:
    config.training.max_steps, config.training.micro_batch_size, config.training.log_every = 77, 1, 3
    OmegaConf.save(OmegaConf.structured(config), saved / "config.yaml")
    assert newest(saved) == "step-00000002"


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "checkpoint_every", "kept"),
    [
        (2, None, 10, [30, 33, 35]),
        (1, None, 5, [35]),
        (1, 10, 5, [10, 20, 30, 35]),
        (9, None, 1, [10, 12, 20, 30, 33, 35]),
        (1, None, 100, [35]),
    ],
)
def test_the_last_the_multiples_and_the_newest_regular_one_are_kept(
    tmp_path: Path, keep_last: int, keep_every: int | None, checkpoint_every: int, kept: list[int]
) -> None:
    # 40 lies beyond the newest: it was passed over as damaged
    for step in (10, 12, 20, 30, 33, 35, 40):
        (tmp_path / f"step-{step:08d}").mkdir()
    for left_over in (".saving-step-00000033", ".universal-step-00000030"):
        (tmp_path / left_over / "deepspeed").mkdir(parents=True)
    newest = tmp_path / "step-00000035"
    prune(tmp_path, newest, keep_last=keep_last, keep_every=keep_every, checkpoint_every=checkpoint_every)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in kept]


def test_nothing_starts_over_where_no_checkpoint_is_whole(saved: Path) -> None:
    for path in (saved / "checkpoints").glob("step-*"):
        _truncate(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint in it is valid .* resume=retrain"):
        newest_checkpoint(saved)


def test_a_directory_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None


def test_a_checkpoint_is_read_by_its_own_path(saved: Path) -> None:
    assert read_manifest(saved / "checkpoints/step-00000001")["step"] == 1
