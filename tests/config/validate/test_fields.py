from pathlib import Path

import pytest

import depthlm
from depthlm.config import ConfigError
from depthlm.data.settings import Source

LOCAL = ["data=local", "data.source=."]


def test_sources_and_validation_sets_can_be_set_on_the_command_line_and_in_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.yaml").write_text(
        "name: own\ntokenizer: bytes\nsources:\n  web: {source: ., weight: 3}\n  code: {path: here, weight: 1}\n"
    )
    data = depthlm.compose(["data=own", "data.sources.web.weight=2", "data.validation.a.source=."], tmp_path).data
    assert data.sources == {"web": Source(source=".", weight=2.0), "code": Source(path="here", weight=1.0)}
    assert data.validation == {"a": Source(source=".")}
    counted = depthlm.compose([*LOCAL, "data.sources={a: {files: x, weight: 1, num_tokens: 3B}}"]).data
    assert counted.sources["a"].num_tokens == 3 * 10**9


def test_a_source_of_a_mixture_can_be_deleted() -> None:
    names = depthlm.compose(["data=olmo2_mix", "~data.sources.dclm"]).data.sources
    assert list(names) == ["starcoder", "pes2o", "arxiv", "open-web-math", "algebraic-stack", "wiki"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.sources.arxv.weight=3", "data.sources.arxv: has no text; give one of"),
        ("data.validation.a.sorce=.", "data.validation.a.sorce=.: no such key; did you mean `source`?"),
        ("data.validation.a=.", "data.validation.a=.: must be a group"),
        ("data.validation.a.source=nowhere", "data.validation.a.source=nowhere: no such folder or file"),
        (
            "data.validation.a.text_field=x",
            "data.validation.a: has no text; give one of files, hub,",
        ),
        ("data.validation.a.files=x", "data.validation.a.source: a needs text"),
        ("data.validation.a={source: ., weight: 2}", "data.validation.a.weight=2.0: a validation set has none"),
        ("data.validation.local.source=.", "data.validation.local: also the name of a source"),
        ("data.sources.a.source=.", "data.sources.a.weight: missing"),
        ("data.sources.a.weight=-1", "data.sources.a.weight=-1: must be a number, above 0"),
        ("data.sources.a.weight=much", "data.sources.a.weight=much: must be a number, above 0"),
        ("data.sources={a: {weight: 1, text_bytes: 1Q}}", "data.sources.a.text_bytes=1Q: must be a whole number"),
        ("data.weight=1", "data.weight: only a source of a mixture has one"),
        ("data.fraction=0", "data.fraction=0.0: must be a number, above 0, at most 1"),
        ("data.on_bad_document=ignore", "data.on_bad_document=ignore: must be one of error, skip"),
        ("data.tokenizer=own/tokenizer.json", "no such tokenizer.json, and no model of the hub"),
    ],
)
def test_a_mistake_in_a_source_is_reported_with_the_allowed_values(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        depthlm.compose([*LOCAL, override])
    assert words in str(caught.value)


def test_only_one_length_of_a_run_is_allowed() -> None:
    config = depthlm.compose([*LOCAL, "training.max_epochs=3"])
    assert (config.training.max_steps, config.training.max_tokens, config.training.max_epochs) == (None, None, 3)
    with pytest.raises(ConfigError, match=r"training\.max_steps and training\.max_epochs: both given"):
        depthlm.compose([*LOCAL, "training.max_epochs=3", "training.max_steps=4"])
