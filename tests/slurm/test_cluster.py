"""The resources of a job, from the keys `slurm.` and slurm/cluster.yaml in the current folder."""

from pathlib import Path

import pytest

from depthlm.errors import UserError
from depthlm.slurm.cluster import SETTINGS, Cluster, read_cluster


@pytest.fixture(autouse=True)
def _current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SETTINGS.parent.mkdir()


def test_without_a_file_and_with_one_that_sets_nothing_all_keys_have_their_defaults():
    assert read_cluster([]) == Cluster()
    assert Cluster().options() == [
        "--time=24:00:00", "--nodes=1", "--ntasks-per-node=8", "--cpus-per-task=8", "--gpus-per-node=8",
        "--signal=B:USR1@120",
    ]  # fmt: skip
    for content in ("", "# nothing yet\n", "extra: []\n", "setup:\n"):
        SETTINGS.write_text(content)
        assert read_cluster([]) == Cluster()


def test_a_file_changes_defaults_and_the_command_line_takes_precedence():
    SETTINGS.write_text(
        "# ours\npartition: h100\naccount:\nqos: null\nmem: ~\ntime: 12:00:00\nnodes: 2\nthrottle: '4'\n"
        "setup: |\n  module load cuda/13.0\n  export A=[1,2]\n"
        "extra:\n  - --exclude=n1,n2\n  - --constraint=h100\n"
    )
    cluster = read_cluster(["nodes=3", "account=mine"])
    setup, extra = "module load cuda/13.0\nexport A=[1,2]\n", ["--exclude=n1,n2", "--constraint=h100"]
    expected = Cluster(partition="h100", account="mine", time="12:00:00", nodes=3, throttle=4, setup=setup, extra=extra)
    assert cluster == expected
    assert {"--partition=h100", "--time=12:00:00", "--nodes=3", "--exclude=n1,n2"} <= set(cluster.options())


def test_extra_options_may_contain_commas_and_brackets():
    for given, options in (
        ("[--exclude=n3, --constraint=h100]", ["--exclude=n3", "--constraint=h100"]),
        ("[--exclude=n[1-3,5],--exclusive]", ["--exclude=n[1-3,5]", "--exclusive"]),
        ("--exclude=n1,n2,-v", ["--exclude=n1,n2", "-v"]),
        ("", []),
    ):
        SETTINGS.unlink(missing_ok=True)
        assert read_cluster([f"extra={given}"]).extra == options
        SETTINGS.write_text(f"extra: '{given}'\n")
        assert read_cluster([]).extra == options


def test_ranks_and_their_memory_are_those_of_the_gpus_or_of_the_node():
    for given, tasks, memory in (
        (["gpu_memory=80"], "8", 80_000_000_000),
        (["gpus_per_node=0", "tasks_per_node=2", "mem=500G"], "2", 250 * 2**30),
        (["gpus_per_node=0", "mem=4096"], "1", 4 * 2**30),
        # with GPUs, a node has a rank for each
        (["tasks_per_node=4", "gpu_memory=80"], "8", 80_000_000_000),
        (["gpus_per_node=0", "mem=0"], "1", None),
    ):
        cluster = read_cluster(given)
        assert f"--ntasks-per-node={tasks}" in cluster.options()
        assert cluster.memory_per_rank() == memory
        assert any(option.startswith("--gpus") for option in cluster.options()) == ("gpus_per_node=0" not in given)


def test_all_mistakes_of_the_command_line_are_reported_with_their_keys():
    with pytest.raises(UserError) as error:
        read_cluster(["node=2", "nodes=0", "time=null", "oops"])
    for words in ("4 mistakes:", "slurm.node=2: no such key", "did you mean `nodes`?", "slurm.time=null: must be text",
                  "slurm.nodes=0: must be an integer, at least 1", "slurm.oops: not key=value"):  # fmt: skip
        assert words in str(error.value)


def test_an_invalid_file_is_reported():
    for content, message in (
        (b"node: 2\n", "did you mean `nodes`?"),
        (b"\xff\xfe\x00\x01", "not a YAML file"),
        (b"nodes=2\n", "must have a line `key: value`"),
        (b"extra: [{exclude: n3}]\n", "extra: must be one value, or a list of values"),
    ):
        SETTINGS.write_bytes(content)
        with pytest.raises(UserError) as error:
            read_cluster([])
        assert str(error.value).startswith(f"{SETTINGS}: ")
        assert message in str(error.value)
