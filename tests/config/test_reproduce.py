"""The overrides that reproduce a run, from its resolved configuration alone."""

import shlex
from dataclasses import asdict

import pytest

from depthlm.config import compose_anywhere
from depthlm.config.reproduce import train_overrides
from depthlm.config.saved import compare

SMALL = ["size=micro", "data.tokenizer=bytes", "output_dir=any"]
# overrides, and those that must be among the reproduced ones
CASES = {
    "pair": (
        ["model/connection=mhc", "model/attention=depth_attention", "model.connection.num_streams=2"],
        ["model/connection=mhc", "model/attention=depth_attention", "model.connection.num_streams=2"],
    ),
    "lengths and lists": (
        ["training.max_tokens=1B", "schedule.warmup_steps=10", "training.batch_tokens=64K", "size.lr=2e-3",
         "optimizer=muon", "optimizer.betas=[0.8,0.9]"],
        ["training.max_tokens=1B", "training.batch_tokens=64K", "optimizer=muon", "optimizer.betas=[0.8,0.9]"],
    ),
    "mixture": (
        ["data.sources.a.source=a", "data.sources.a.weight=1", "data.sources.b.source=b", "data.sources.b.weight=2"],
        ["data.sources.b.source=b"],
    ),
    "words": (["data=local", "data.source='my text, no. 2'"], ["data=local", "data.source='my text, no. 2'"]),
    "parametrization": (
        ["parametrization=completep", "parametrization.base_size=tiny"],
        ["parametrization=completep", "parametrization.base_size=tiny"],
    ),
    "budget": (["experiment=depth_attention/main", "model=mhc", "budget=smoke"], ["model=mhc", "budget=smoke"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_overrides_compose_the_same_configuration(case):
    given, expected = CASES[case]
    config = compose_anywhere([*SMALL, *given])
    overrides = train_overrides(config)
    assert overrides is not None
    words = shlex.split(" ".join(overrides))
    assert {*expected, "size=micro"} <= {*words}
    again = compose_anywhere([*words, "output_dir=any"])
    differing = compare(asdict(config), asdict(again))
    assert not [name for name in differing if not name.startswith("budget.")]


def test_an_absolute_path_is_not_published():
    config = compose_anywhere([*SMALL, "data=local", "data.source=/home/me/secret/text", "init_from=/srv/run"])
    overrides = train_overrides(config)
    assert overrides is not None
    assert {"data.source=/path/to/text", "init_from=/path/to/run"} <= {*overrides}
