"""Budgets: the settings that they reduce, and those that they preserve."""

import pytest

from depthlm.config import compose, run_steps, warmup_steps
from depthlm.config.resolve import matrices
from depthlm.config.schema import Config
from depthlm.sweeps import check_points

MINE = "experiment=depth_attention/mixing_rule"


def of(*overrides: str) -> Config:
    return compose([MINE, *overrides, "output_dir=any"], here=False)


def test_smoke_preserves_depth_mechanism_and_heads_and_needs_no_download():
    paper, smoke = of("model=mhc"), of("model=mhc", "budget=smoke")
    assert (smoke.size.num_layers, smoke.model) == (paper.size.num_layers, paper.model)
    assert (smoke.size.num_heads, smoke.size.num_kv_heads) == (paper.size.num_heads, paper.size.num_kv_heads)
    assert (smoke.size.hidden_size, smoke.size.head_size) == (72, 4)
    assert (smoke.data.name, smoke.data.tokenizer, smoke.size.vocab_size) == ("stdlib", "bytes", 320)
    assert (smoke.precision.name, smoke.deepspeed.stage) == ("fp32", 0)
    assert smoke.training.batch_size * smoke.training.sequence_length == 256
    assert run_steps(smoke) == 12
    assert smoke.schedule.warmup_ratio == paper.schedule.warmup_ratio
    assert smoke.training.validate_every in (3, 4)
    # the micro-batch of the protocol is for its batch
    assert (paper.training.micro_batch_size, smoke.training.micro_batch_size) == (4, None)
    assert of("budget=smoke", "training.batch_size=2").training.micro_batch_size is None


def test_smoke_divides_experts_but_leaves_a_token_a_choice():
    size = compose(["experiment=attention_residuals/kimi_linear", "budget=smoke"], here=False).size
    assert (size.num_experts, size.experts_per_token, size.expert_size) == (16, 8, 64)
    assert (size.latent_size, size.shared_key_size) == (32, 4)


def test_gpu_hour_preserves_the_model_and_reduces_steps_to_its_flops():
    paper, hour = of(), of("budget=gpu_hour")
    assert (hour.size, hour.data, hour.precision) == (paper.size, paper.data, paper.precision)
    tokens = hour.training.batch_size * hour.training.sequence_length
    assert tokens == 262_144
    steps = run_steps(hour)
    assert steps is not None
    # the models of the experiment have 500M parameters, and an hour is a sixtieth of the paper's compute for each
    assert steps * tokens / (15625 * 1024 * 2048) == pytest.approx(1.44e18 / 8.65e19, rel=0.01)
    # a run without an experiment
    alone = compose(["budget.flops=1e12"])
    spent = 6 * matrices(alone) * (run_steps(alone) or 0) * alone.training.batch_size * alone.training.sequence_length
    assert spent == pytest.approx(1e12, rel=0.05)
    # the matrices contain most of the parameters
    assert matrices(hour) == pytest.approx(498.17e6 - 50304 * 1152, rel=0.01)
    assert hour.training.batch_size % (hour.training.micro_batch_size or 1) == 0


def test_the_schedule_keeps_its_shape():
    for name, steps in (("dca/depth", 500_000), ("dca/depth", 12)):
        config = compose([f"experiment={name}", *(["budget=smoke"] if steps == 12 else [])], here=False)
        assert warmup_steps(config, steps) == max(1, round(1000 * steps / 500_000))


def test_a_batch_in_tokens_has_as_many_of_the_shorter_sequences():
    training = compose(["budget=smoke", "training.batch_tokens=1024"], here=False).training
    assert training.batch_size * training.sequence_length == 1024


def test_points_that_differ_in_the_document_mask_train_on_the_same_text(tmp_path):
    file = tmp_path / "experiment/mine/masks.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\nexperiment:\n  title: masks\n  points: [{data.document_mask: [true, bos, false]}]\n"
    )
    points = check_points(["experiment=mine/masks", "budget=smoke"], tmp_path)
    assert [(point.config.data.name, point.config.data.document_mask) for point in points] == [
        ("stdlib", True), ("stdlib", "bos"), ("stdlib", False),
    ]  # fmt: skip


def test_settings_of_the_command_line_are_preserved():
    chosen = of("budget=smoke", "training.max_steps=50", "size.hidden_size=64", "data.tokenizer=bpe", "precision=bf16")
    assert run_steps(chosen) == 50
    assert chosen.size.hidden_size == 64
    assert (chosen.data.name, chosen.data.tokenizer) == ("pile", "bpe")
    assert chosen.precision.name == "bf16"


def test_a_size_is_shrunk_with_and_without_an_experiment_but_not_its_single_keys():
    for source in ([], [MINE], ["experiment=depth_attention/scaling"]):
        size = compose([*source, "size=1.5b", "budget=smoke", "size.intermediate_size=100"], here=False).size
        assert (size.hidden_size, size.num_layers, size.intermediate_size, size.vocab_size) == (96, 48, 100, 320)


def test_a_budget_measures_the_same_text_with_any_batch_and_replaces_epochs(tmp_path):
    tokens = {
        compose([f"training.batch_size={size}", "budget=smoke"], here=False).training.validation_tokens
        for size in (2, 4)
    }
    assert len(tokens) == 1
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntraining: {max_steps: null, max_epochs: 3}\nexperiment: {points: [{model: vanilla}]}\n"
    (tmp_path / "experiment" / "epochs.yaml").write_text(text)
    training = compose(["experiment=epochs", "model=vanilla", "budget=smoke"], tmp_path, here=False).training
    assert (training.max_steps, training.max_epochs) == (12, None)
