"""The points of a sweep, as used by -m, submit.py and report."""

import re
from pathlib import Path

import pytest

from depthlm.config import ConfigError, compose
from depthlm.sweeps import Point, check_points, load_experiment, sweep_points

MINE = """# @package _global_
training:
  max_steps: 50
experiment:
  title: mine
  points:
    - {label: plain, model: vanilla, paper: {loss: 2.5}}
    - {model: [mhc, dca], size: [micro, tiny], paper: {loss: null}}
    - {label: later, model: moda, init_from: "@plain", optimizer.betas: [[0.9, 0.99]]}
  columns:
    loss: {title: loss, metric: validation_loss}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, MINE)


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "experiment/mine").mkdir(parents=True, exist_ok=True)
    (tmp_path / "experiment/mine/it.yaml").write_text(text)
    return tmp_path


def test_axes_give_all_combinations_in_order():
    points = sweep_points(["model=vanilla", "seed=1,2", "size=micro,tiny"])
    assert [point.overrides for point in points] == [
        ["model=vanilla", f"seed={seed}", f"size={size}"] for seed in (1, 2) for size in ("micro", "tiny")
    ]
    assert [point.overrides for point in sweep_points(["deepspeed=glob(zero*)"])] == [
        [f"deepspeed=zero{stage}"] for stage in (0, 1, 2, 3, "3_offload")
    ]


def test_an_experiment_multiplies_its_points_by_the_axes(folder):
    points = sweep_points(["experiment=mine/it", "seed=1,2"], folder)
    assert len(points) == 12
    assert len({tuple(point.overrides) for point in points}) == 12
    assert [point.label for point in points[:6]] == [
        "plain", "mhc, micro", "mhc, tiny", "dca, micro", "dca, tiny", "later",
    ]  # fmt: skip
    assert points[0].paper == {"loss": 2.5}
    assert points[1].overrides == ["experiment=mine/it", "seed=1", "model=mhc", "size=micro"]
    for point in points[::5]:
        if not point.follows:
            config = compose(point.overrides, folder)
            assert config.training.max_steps == 50
            assert config.output_dir == point.directory


def test_a_point_may_start_from_another_of_the_same_seed(folder):
    points = {
        (point.label, point.settings["seed"]): point
        for point in sweep_points(["experiment=mine/it", "seed=1,2"], folder)
    }
    for seed in "12":
        later, plain = points["later", seed], points["plain", seed]
        assert f"init_from={plain.directory}" in later.overrides
        assert "optimizer.betas=[0.9,0.99]" in later.overrides
        assert later.follows
    assert len(check_points(["experiment=mine/it"], folder)) == 6


def test_a_value_of_the_points_selects_them(folder):
    points = sweep_points(["experiment=mine/it", "model=mhc,vanilla,moda"], folder)
    assert [point.label for point in points] == ["mhc, micro", "mhc, tiny", "plain", "later"]
    whole = {tuple(sorted(point.overrides)) for point in sweep_points(["experiment=mine/it"], folder)}
    # `later` still starts from the run of `plain`
    assert {tuple(sorted(point.overrides)) for point in points} <= whole
    # in any spelling
    write(folder, MINE.replace("model: vanilla, paper", "model: vanilla, optimizer.lr: 0.001, paper"))
    (point,) = sweep_points(["experiment=mine/it", "optimizer.lr=1e-3"], folder)
    assert (point.label, point.paper) == ("plain", {"loss": 2.5})
    assert "optimizer.lr=0.001" in point.overrides


def test_a_value_that_no_point_has_replaces_that_of_the_points_that_others_select(folder):
    points = sweep_points(["experiment=mine/it", "model=mhc", "size=1.5b"], folder)
    assert [(point.settings["model"], point.settings["size"], point.paper) for point in points] == [("mhc", "1.5b", {})]
    # of two values that no point has together, that of the option selects
    lines = MINE.replace("size: [micro, tiny]", "size: micro, optimizer.lr: 0.001").replace(
        "model: vanilla,", "model: vanilla, optimizer.lr: 0.002,"
    )
    (point,) = sweep_points(["experiment=mine/it", "model=mhc", "optimizer.lr=2e-3"], write(folder, lines))
    assert sorted(point.overrides) == ["experiment=mine/it", "model=mhc", "optimizer.lr=2e-3", "size=micro"]
    # a point starts from the one of its seed, with the settings of that
    write(folder, MINE.replace("{label: plain,", "{label: plain, seed: [1, 2], training.max_steps: 30,"))
    (later,) = sweep_points(["experiment=mine/it", "model=moda", "seed=2"], folder)
    (plain,) = sweep_points(["experiment=mine/it", "model=vanilla", "seed=2"], folder)
    (shorter,) = sweep_points(["experiment=mine/it", "model=moda", "seed=2", "training.max_steps=20"], folder)
    assert all(f"init_from={plain.directory}" in point.overrides for point in (later, shorter))
    with pytest.raises(ConfigError, match="that point has no seed 7; its seeds: 1, 2"):
        sweep_points(["experiment=mine/it", "model=moda", "seed=7"], folder)


def test_a_length_or_warm_up_replaces_that_of_the_points(folder):
    write(folder, MINE.replace("model: vanilla,", "model: vanilla, training.max_tokens: 1M, schedule.warmup_steps: 5,"))
    given = ["experiment=mine/it", "model=vanilla", "training.max_steps=100", "schedule.warmup_ratio=0.1"]
    (point,) = check_points(given, folder)
    assert sorted(point.overrides) == sorted(given)


def test_a_seed_applies_to_points_without_one(tmp_path):
    lines = MINE.replace("model: [mhc, dca], size: [micro, tiny]", "model: [mhc, dca], seed: [1, 2]")
    points = sweep_points(["experiment=mine/it", "seed=2"], write(tmp_path, lines))
    assert [(point.label, point.settings["seed"]) for point in points] == [
        (label, "2") for label in ("plain", "mhc", "dca", "later")
    ]


def test_a_point_carries_what_a_comparison_needs(folder):
    named, other = (
        sweep_points(["experiment=moda/model_size", "seed=3", "size=moda_700m"]),
        Point([], {"model/attention": "moda"}),
    )
    assert [(point.label, point.mechanism, point.seed, point.task) for point in named] == [
        ("MoDA, 700M", "moda", "3", {"task": "700M"})
    ]
    assert (other.mechanism, other.seed, other.task, other.label) == ("moda", None, {}, "")
    micro = sweep_points(["experiment=mine/it", "model=mhc", "size=micro", "optimizer.lr=1e-2"], folder)[0]
    assert (micro.parts, micro.task) == ({"model": "mhc", "size": "micro"}, {"size": "micro"})
    (plain,) = sweep_points(["model=mhc", "training.max_steps=5"])
    assert (plain.label, plain.mechanism, plain.task) == ("mhc", "mhc", {"training.max_steps": "5"})


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        (["model=mhc", "seed=1,2"], ["mhc", "mhc"]),
        (["optimizer.lr=1e-3,3e-3", "seed=1", "model=vanilla,mhc"], [
            "vanilla, lr 1e-3", "mhc, lr 1e-3", "vanilla, lr 3e-3", "mhc, lr 3e-3",
        ]),
        (["model/connection=residual,mhc", "model/attention=moda"], ["moda", "mhc+moda"]),
        (["size=micro", "optimizer=adamw,muon"], ["adamw", "muon"]),
    ],
)  # fmt: skip
def test_a_point_of_a_sweep_is_named_by_what_varies(overrides, labels):
    assert [point.label for point in sweep_points(overrides)] == labels


def test_a_point_may_be_named_by_an_interpolation():
    points = check_points(["model=vanilla,mhc", "seed=1,2", "name='${model.name}_${seed}'"])
    assert [point.directory for point in points] == [
        f"outputs/default/{model}_{seed}" for model in ("vanilla", "mhc") for seed in (1, 2)
    ]
    for text in ("name=mine", "output_dir=x"):
        with pytest.raises(ConfigError, match="several points of the sweep would write there"):
            check_points(["seed=1,2", text])


def test_a_point_cannot_start_from_an_incomplete_one(tmp_path):
    folder = write(tmp_path, MINE)
    later = sweep_points(["experiment=mine/it", "model=moda", f"output_dir={tmp_path}/${{model.name}}"], folder)[0]
    (tmp_path / "vanilla/checkpoints/step-00000010").mkdir(parents=True)
    with pytest.raises(ConfigError, match="not complete; train it first"):
        compose(later.overrides, folder)
    (tmp_path / "vanilla/summary.json").write_text("{}")
    assert compose(later.overrides, folder).init_from == f"{tmp_path}/vanilla"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("- vanilla", ["points[0]=vanilla", "must be settings"]),
        ("- {model: vanilla, paper: {los: 2}}", ["points[0].paper.los", "no such column", "`loss`"]),
        ("- {model: mhc, paper: {loss: [2.5, -0.1]}}", ["paper.loss=[2.5,-0.1]: must be a number, [number, spread]"]),
        ("- {model: [vanilla, vanilla]}", ["points[0]", "a second point with the label vanilla"]),
        ("- {model: mhc, init_from: '@plain'}", ["points[0]", "@plain", "no earlier point has this label"]),
        (
            "- {label: plain, model: dca}\n    - {model: moda, seed: [1, 2], init_from: '@plain'}",
            ["init_from=@plain: that point has no seed 1; its seeds: the default"],
        ),
    ],
)
def test_invalid_points_are_reported(tmp_path, line, words):
    text = MINE[: MINE.index("    - {label")] + f"    {line}\n" + MINE[MINE.index("  columns") :]
    with pytest.raises(ConfigError) as caught:
        sweep_points(["experiment=mine/it"], write(tmp_path, text))
    assert all(word in str(caught.value) for word in words)


def test_an_unknown_column_or_experiment_and_a_broken_file_are_reported(tmp_path):
    folder = write(tmp_path, MINE.replace("metric:", "metrik:"))
    with pytest.raises(ConfigError, match="metrik"):
        load_experiment("mine/it", folder)
    with pytest.raises(ConfigError, match=r"did you mean `mine/it`"):
        load_experiment("mine/its", write(tmp_path, MINE))
    with pytest.raises(ConfigError, match=r"mine/it\.yaml"):
        check_points(["experiment=mine/it"], write(tmp_path, f"{MINE}\n  broken: [1"))


def test_mistakes_of_a_sweep_and_of_its_points_are_reported_together():
    overrides = ["model=vanilla,mHC", "optimizer.lrr=1", "experiment.best_over=optimizer.lr"]
    overrides += ["experiment.selection_seeds=[]"]
    with pytest.raises(ConfigError) as caught:
        check_points(overrides)
    text = "\n".join(caught.value.errors)
    assert "experiment.best_over=optimizer.lr: needs experiment.selection_seeds" in text
    assert "optimizer.lrr=1: no such key; did you mean `optimizer.lr`?" in text
    assert re.search("model=mHC: no such model; .*did you mean `mhc`", text)


def test_a_range_has_its_values_in_any_order_or_is_refused():
    for text, values in {"sort(range(0,7,3))": [0, 3, 6], "range(4,-1,-2)": [4, 2, 0],
                         "sort(3,1,2,reverse=true)": [3, 2, 1]}.items():  # fmt: skip
        assert [point.overrides for point in sweep_points([f"seed={text}"])] == [[f"seed={value}"] for value in values]
    for text, message in {
        "sort(range(4,-1,-2))": "values 1,3,5, which are not those of range(4,-1,-2); list them",
        "glob(*.md)": "gives no value",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_points([f"seed={text}"])


def test_options_of_an_additional_folder_are_found_by_glob(tmp_path):
    (tmp_path / "size").mkdir()
    for name in ("mine_a", "mine_b"):
        (tmp_path / f"size/{name}.yaml").write_text("defaults: [micro]\n")
    points = sweep_points(["size=glob(mine_*)"], tmp_path)
    assert [point.overrides for point in points] == [["size=mine_a"], ["size=mine_b"]]


def test_texts_that_look_like_numbers_stay_as_they_were_given():
    points = sweep_points(["data=stdlib", "data.subset=1.10, 1.20,'2024_01'"])
    assert [point.overrides[1] for point in points] == ["data.subset=1.10", "data.subset=1.20", "data.subset='2024_01'"]
    assert [point.config.data.subset for point in points] == ["1.10", "1.20", "2024_01"]


def test_a_point_starts_from_a_directory_with_any_characters(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\nexperiment:\n  points:\n    - {label: first, model: vanilla, seed: 1}\n"
        "    - {label: next, model: mhc, init_from: '@first', seed: 1}\n"
    )
    overrides = ["experiment=mine", "size=micro", "output_dir='runs/lr=1, ${model.name}'"]
    first, following = check_points(overrides, tmp_path, here=False)
    assert following.starts == [first.directory] == ["runs/lr=1, vanilla"]
    assert following.config.init_from == first.directory
