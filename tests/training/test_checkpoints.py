"""A checkpoint is whole or it is none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import depthlm
from depthlm.environment import ranks
from depthlm.training.checkpoints import CheckpointError, newest_checkpoint, read_manifest, save_checkpoint
from depthlm.training.engine import build_engine, start_distributed
from depthlm.training.plan import make_plan


@pytest.fixture
def engine(small_run: Callable[..., list[str]]) -> Any:
    """A fresh engine of a tied model."""
    config = depthlm.compose(small_run("backbone.tie_embeddings=true"))
    start_distributed(ranks())
    return build_engine(config, make_plan(config, ranks()), depthlm.build_model(config))


@pytest.fixture
def saved(engine: Any, tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save_checkpoint(engine, tmp_path, {"step": step, "skipped": [7]}, keep_last=3)
    return tmp_path


def test_the_manifest_holds_the_state_and_every_file(saved: Path) -> None:
    found = newest_checkpoint(saved)
    assert found is not None
    path, manifest = found
    assert path.name == (saved / "checkpoints/latest").read_text().strip() == "step-00000002"
    assert (manifest["step"], manifest["skipped"]) == (2, [7])
    on_disk = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == on_disk
    assert any(name.startswith("deepspeed/") for name in on_disk)


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


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("model.safetensors", _truncate, "is not what was saved"),
        ("model.safetensors", _flip, "is not what was saved"),
        ("model.safetensors", Path.unlink, "is missing"),
        ("deepspeed/mp_rank_00_model_states.pt", _flip, "is not what was saved"),
        ("deepspeed/mp_rank_00_model_states.pt", Path.unlink, "is missing"),
        ("manifest.json", Path.unlink, "no readable manifest.json"),
        ("manifest.json", _truncate, "no readable manifest.json"),
        ("manifest.json", lambda path: path.write_text("{}"), "no readable manifest.json"),
    ],
)
def test_damage_is_found_and_the_one_before_is_taken(
    saved: Path, file: str, damage: Callable[[Path], object], words: str
) -> None:
    newest = saved / "checkpoints/step-00000002"
    damage(newest / file)
    with pytest.raises(CheckpointError, match=words):
        read_manifest(newest)
    found = newest_checkpoint(saved)
    assert found is not None
    assert found[0].name == "step-00000001"


def test_only_the_last_are_kept_and_left_overs_are_removed(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoints/.saving-step-00000001/deepspeed").mkdir(parents=True)
    for step in range(2, 6):
        save_checkpoint(engine, tmp_path, {"step": step}, keep_last=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000004", "step-00000005"]
    assert json.loads((tmp_path / "checkpoints/step-00000005/manifest.json").read_text())["step"] == 5


def test_a_damaged_checkpoint_beyond_the_newest_does_not_count_among_the_last(engine: Any, saved: Path) -> None:
    _flip(saved / "checkpoints/step-00000002/model.safetensors")
    (saved / "checkpoints/step-00000002").rename(saved / "checkpoints/step-00000009")
    save_checkpoint(engine, saved, {"step": 3}, keep_last=1)
    assert sorted(path.name for path in (saved / "checkpoints").iterdir()) == ["latest", "step-00000003"]


def test_nothing_starts_over_where_no_checkpoint_is_whole(saved: Path) -> None:
    for path in (saved / "checkpoints").glob("step-*"):
        _truncate(path / "model.safetensors")
    with pytest.raises(CheckpointError, match="none of its checkpoints is whole; remove"):
        newest_checkpoint(saved)


def test_a_directory_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
