"""The keys of the schema: what each allows, and what a change to it means for a run that resumes."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthlm.config.keys import flatten, in_protocol, keys, on_resume, validate
from depthlm.config.schema import Config
from depthlm.data.settings import Source

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
def test_a_key_allows_what_it_states(name: str, allowed: list[Any], refused: list[Any]) -> None:
    assert [value for value in allowed if not keys()[name].allows(value)] == []
    assert [value for value in refused if keys()[name].allows(value)] == []


@given(st.sets(st.sampled_from(["training.max_steps", "training.batch_size", "seed", "optimizer.lr"])))
def test_all_values_that_are_not_allowed_are_named_at_once(wrong: set[str]) -> None:
    values: dict[str, Any] = {"training": {"max_steps": 1, "batch_size": 1}, "optimizer": {"lr": 1.0}}
    for name in wrong:
        section, _, key = name.rpartition(".")
        (values[section] if section else values)[key] = -1
    assert {".".join(place) for place in validate(Config, values)[1]} == wrong


@given(st.integers(min_value=1, max_value=10**6), st.sampled_from(["", "K", "M", "B", "T"]))
def test_a_count_is_an_integer_whatever_its_unit(number: int, unit: str) -> None:
    expected = number * 10 ** (3 * " KMBT".index(unit or " "))
    assert validate(Source, {"num_tokens": f"{number}{unit}"}) == (Source(num_tokens=expected), [])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("seed", "fixed"),
        ("training.log_every", "free"),
        ("training.compile", "logged"),
        ("tracker", "free"),
        ("tracker.project", "free"),
        ("experiment", "free"),
        ("hydra/launcher", "free"),
        ("hydra.verbose", "free"),
        ("model/connection", "fixed"),
        ("model.connection.block_size", "fixed"),
        ("data.sources.web.weight", "fixed"),
        ("no.such.key", "fixed"),
    ],
)
def test_a_key_a_group_and_a_name_inside_a_group_have_an_effect_on_resuming(name: str, expected: str) -> None:
    assert on_resume(name) == expected


def test_the_page_names_every_key_that_may_change_with_a_line_in_the_log() -> None:
    text = PAGE.read_text()
    logged = [name for name in keys() if on_resume(name) == "logged"]
    assert [name for name in logged if name.rpartition(".")[2] not in text] == []


def test_runs_of_one_protocol_may_differ_in_mechanism_seed_and_what_does_not_affect_the_result() -> None:
    apart = ("model.connection.block_size", "seed", "precision.name", "training.log_every", "training.compile")
    assert [name for name in apart if in_protocol(name)] == []
    assert all(map(in_protocol, ("optimizer.lr", "size.hidden_size", "training.batch_size", "data.name")))


def test_nested_settings_are_flattened_to_dotted_names() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [2], "e": {}}
