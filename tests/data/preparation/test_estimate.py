import shlex

import pytest

import depthlm
from depthlm.config import prepare_command
from depthlm.data import DataError, check_prepared, prepare
from depthlm.data.preparation.prepare import BYTES_PER_CORE_SECOND, estimate
from depthlm.data.settings import Data, Source


@pytest.mark.parametrize(
    ("overrides", "disk", "download"),
    [
        # a token takes 2 bytes with the GPT-NeoX vocabulary, 4 with dolma2's
        (["data=pile"], 400e9, 335e9),
        (["data=fineweb_edu", "data.max_tokens=10B"], 20e9, 28.6e9),
        (["data=pile", "data.tokenizer=bytes"], 1720e9, 335e9),
    ],
)
def test_the_estimate_of_a_hub_corpus_is_the_prepared_share_of_the_configured_sizes(overrides, disk, download):
    data = depthlm.compose(overrides).data
    estimated = estimate(data.name, data, data)
    assert estimated is not None
    assert estimated.disk_bytes == pytest.approx(disk)
    assert estimated.download_bytes == pytest.approx(download)
    assert estimated.seconds * BYTES_PER_CORE_SECOND > 1e9


def test_training_refuses_a_large_or_unknown_corpus_and_prints_the_command_that_prepares_it(local, monkeypatch):
    check_prepared(local(), lambda: "prepare it")
    monkeypatch.setattr("depthlm.data.preparation.prepare.MAX_TRAINING_BYTES", 10)
    with pytest.raises(DataError, match=r"not prepared: local.* of disk .* [0-9]+ (s|min) on.*\n +prepare it"):
        check_prepared(local(), lambda: "prepare it")
    prepare(local())
    prepare(local(tokenizer="bytes"))
    check_prepared(local(), lambda: "prepare it")
    with pytest.raises(DataError, match="an unknown amount for own"):
        check_prepared(Data(name="own", hub="some/corpus", tokenizer="bytes"), lambda: "prepare it")
    with pytest.raises(DataError, match="not prepared: further"):
        check_prepared(
            local(tokenizer="bytes", validation={"further": Source(source=local().source)}), lambda: "prepare it"
        )


def test_empty_text_takes_nothing(tmp_path):
    (tmp_path / "empty.txt").touch()
    data = Data(name="local", source="empty.txt", max_tokens=100)
    assert estimate(data.name, data, data) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data=fineweb_edu", "data.max_tokens=10B", "data.subset=null"],
        ["data=olmo2_mix", "data.max_tokens=1.5M", "data.source=.", "data.sources.wiki.files='*a b*'",
         "data.sources.arxiv.weight=40", "data.path=some/folder", "~data.sources.dclm"],
        ["data=local", "data.source=.", "data.validation={one: {source: ., files: '1*'}}", "data.shard_tokens=5000"],
    ],
)  # fmt: skip
def test_the_printed_command_composes_the_same_data_configuration(overrides):
    config = depthlm.compose(overrides)
    command = shlex.split(prepare_command(config))
    assert command[:2] == ["python", "data/prepare.py"]
    assert depthlm.compose(command[2:]).data == config.data
    assert len(command) - 2 <= len(overrides) + 1
