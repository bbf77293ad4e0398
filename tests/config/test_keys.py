"""The keys of the schema: what each allows, and what a change to it means for a run that resumes."""

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import depthlm
from depthlm.config import ConfigError
from depthlm.config.keys import in_protocol, keys, on_resume, validate
from depthlm.config.schema import Config
from depthlm.data.settings import Source

LOCAL = ["data=local", "data.source=."]
PAGE = Path(__file__).parents[2] / "docs/resilience.md"


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("training.max_steps", [1, None, 10**12], [0, -1, 1.5, "many"]),
        ("training.max_tokens", [1, "300M", "1.5B", "2_000", None], [0, "1.5", "3X", True, "inf"]),
        ("optimizer.lr", [1e-3, 1], [0, -1, None, float("nan"), float("inf")]),
        ("training.on_spike", ["log", "skip"], ["", "stop", None]),
        ("data.fraction", [1e-9, 1], [0, 1.1]),
        ("optimizer.betas", [[0.9, 0.95], []], [["a"], None, 0.9]),
        ("dry_run", [True, False], [None, "perhaps"]),
    ],
)
def test_a_key_allows_what_it_states(name, allowed, refused):
    def is_allowed(value: Any) -> bool:
        nested = functools.reduce(lambda inner, part: {part: inner}, name.split(".")[::-1], value)
        _, places = validate(Config, nested)
        return not places

    assert [value for value in allowed if not is_allowed(value)] == []
    assert [value for value in refused if is_allowed(value)] == []


@given(st.sets(st.sampled_from(["training.max_steps", "training.batch_size", "seed", "optimizer.lr"])))
def test_all_values_that_are_not_allowed_are_named_at_once(wrong):
    values: dict[str, Any] = {"training": {"max_steps": 1, "batch_size": 1}, "optimizer": {"lr": 1.0}}
    for name in wrong:
        section, _, key = name.rpartition(".")
        (values[section] if section else values)[key] = -1
    assert {".".join(place) for place in validate(Config, values)[1]} == wrong


def test_a_key_a_group_and_a_name_inside_a_group_have_an_effect_on_resuming():
    for expected, names in {
        "fixed": ("seed", "model/connection", "model.connection.block_size", "data.sources.web.weight", "no.such.key"),
        "logged": ("training.compile",),
        "free": ("training.log_every", "tracker", "tracker.project", "experiment", "hydra/launcher", "hydra.verbose"),
    }.items():
        assert {on_resume(name) for name in names} == {expected}


def test_the_page_names_every_key_that_may_change_with_a_line_in_the_log():
    text = PAGE.read_text()
    logged = [name for name in keys() if on_resume(name) == "logged"]
    assert [name for name in logged if name.rpartition(".")[2] not in text] == []


def test_runs_of_one_protocol_may_differ_in_mechanism_seed_and_what_does_not_affect_the_result():
    apart = ("model.connection.block_size", "seed", "precision.name", "training.log_every", "training.compile")
    assert [name for name in apart if in_protocol(name)] == []
    assert all(map(in_protocol, ("optimizer.lr", "size.hidden_size", "training.batch_size", "data.name")))


def test_sources_and_validation_sets_can_be_set_and_deleted_on_the_command_line_and_in_files(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.yaml").write_text(
        "name: own\ntokenizer: bytes\nsources:\n  web: {source: ., weight: 3}\n  code: {path: here, weight: 1}\n"
    )
    data = depthlm.compose(["data=own", "data.sources.web.weight=2", "data.validation.a.source=."], tmp_path).data
    assert data.sources == {"web": Source(source=".", weight=2.0), "code": Source(path="here", weight=1.0)}
    assert data.validation == {"a": Source(source=".")}
    assert "dclm" not in depthlm.compose(["data=olmo2_mix", "~data.sources.dclm"]).data.sources
    counted = depthlm.compose([*LOCAL, "data.sources={a: {files: x, weight: 1, num_tokens: 3B}}"]).data
    assert counted.sources["a"].num_tokens == 3 * 10**9


MISTAKES = {
    "data.sources.arxv.weight=3": "data.sources.arxv: has no text; give one of",
    "data.validation.a.sorce=.": "data.validation.a.sorce=.: no such key; did you mean `source`?",
    "data.validation.a=.": "data.validation.a=.: must be a group",
    "data.validation.a.source=nowhere": "data.validation.a.source=nowhere: no such folder or file",
    "data.validation.a={source: ., weight: 2}": "data.validation.a.weight=2.0: a validation set has none",
    "data.validation.local.source=.": "data.validation.local: also the name of a source",
    "data.sources.a.source=.": "data.sources.a.weight: missing",
    "data.sources={a: {weight: 1, text_bytes: 1Q}}": "data.sources.a.text_bytes=1Q: must be a whole number",
    "data.weight=1": "data.weight: only a source of a mixture has one",
    "data.on_bad_document=ignore": "data.on_bad_document=ignore: must be one of error, skip",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_in_a_source_is_reported_with_the_allowed_values(override):
    with pytest.raises(ConfigError) as caught:
        depthlm.compose([*LOCAL, override])
    assert MISTAKES[override] in str(caught.value)
