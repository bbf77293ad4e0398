"""Corpora and tokenizers on the hub: small repositories with the layouts of the real ones."""

import gzip
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ...fake_hub import FakeHub, fake_hub
from .hub_repositories import QUESTIONS, REPOSITORIES, TOKENIZER, ask, lines


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    root = tmp_path_factory.mktemp("hub")
    for number, files in enumerate(REPOSITORIES.values()):
        for name, content in files.items():
            file = root / str(number) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    with fake_hub({name: root / str(number) for number, name in enumerate(REPOSITORIES)}) as url:
        url.gated.add("datasets/some/gated")
        url.nulls |= {("datasets/some/null", "revision")}
        # small enough that every listing has several pages
        url.page = 2
        yield url


@pytest.fixture(scope="module")
def asked(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The answers to QUESTIONS and about tokenizers, the requests made for them, and the resulting cache."""
    folder = tmp_path_factory.mktemp("asked")
    # a local folder that must not be used instead of the repository
    (folder / "allenai/c4/en").mkdir(parents=True)
    (folder / "allenai/c4/train.jsonl").write_bytes(lines("here"))
    code = """
out = {name: ask(hub_files, *question) for name, question in given.items()}
for name in ("EleutherAI/gpt-neox-20b", "some/model", "some/nowhere"):
    out[name] = ask(hub_tokenizer, name, ["generation_config.json", "config.json"])
"""
    answers = ask(code, hub.environment(folder / "home"), folder, QUESTIONS)
    return SimpleNamespace(answers=answers, requests=list(hub.requests), data=hub.data_requests(), home=folder / "home")


def names(answer: Any) -> dict[str, list[str]]:
    return {split: [name for name, _ in files] for split, files in answer[1].items()}


FOUND = {
    "c4": {
        "train": [f"en/c4-train.{i:05}-of-01024.json.gz" for i in range(5)],
        "validation": ["en/c4-validation.00000-of-00008.json.gz"],
    },
    "mixed": {
        "train": ["train/a.json.gz", "train/b.jsonl.zst", "train/val-like.jsonl"],
        "validation": ["val/d.parquet"],
    },
}


@pytest.mark.parametrize("question", FOUND)
def test_the_files_of_each_split(asked, hub, question):
    answer = asked.answers[question]
    assert names(answer) == FOUND[question]
    repo, _, revision, _ = QUESTIONS[question]
    commit = hub.commit(f"datasets/{repo}", revision or "main")[0]
    assert answer[0] == commit
    for files in answer[1].values():
        assert all(url == f"hf://datasets/{repo}@{commit}/{name}" for name, url in files)


NULL = "what the Hugging Face hub answered is not as expected"
REFUSED = {
    "c4, no subset": ("none of several subsets is chosen", "data.subset to one of: en, en.noclean."),
    "fineweb, no validation": ("no such split 'validation'", "some of: train."),
    "lm1b, no such folder": ("no such subset 'en'", "a folder of it: plain_text."),
    "lm1b script": ("no file of text (.parquet, .jsonl, .json)", "data.revision=refs/convert/parquet"),
    "null": (NULL, "Try again later, set data.hub"),
    "gated": ("the repository is gated: its owner requires consent", "`hf auth login`, or set data.source=<folder>"),
    "nowhere": ("no such repository on the hub", "It may have moved, or be private or gated: set data.hub, run"),
    "some/model": ("no tokenizer.json in the repository", "data.tokenizer=<its path>"),
    "some/nowhere": ("no such repository on the hub", "set data.tokenizer"),
}


@pytest.mark.parametrize("question", REFUSED)
def test_anything_missing_is_an_error_with_a_remedy(asked, question):
    answer = asked.answers[question]
    what, remedy = REFUSED[question]
    assert answer["what"].startswith(what)
    assert remedy in answer["remedy"]
    assert (QUESTIONS[question][0] if question in QUESTIONS else question) in answer["where"]


def test_listing_reads_no_data_and_runs_no_code(asked):
    assert asked.data == []
    assert not [request for request in asked.requests if request.endswith(".py")]
    assert [request for request in asked.requests if "cursor=" in request], "no listing had several pages"


READ = """
import io, random
from types import SimpleNamespace
import huggingface_hub.utils._http as http
import pyarrow as pa, pyarrow.parquet as pq
from depthlm.data.corpora import hub

waits = []
http.time = SimpleNamespace(sleep=waits.append)
hub._BLOCK = 2**15
urls = {name: url for name, url in hub_files("some/large", None, None, ["train"])[1]["train"]}

def unpacked(url, codec):
    with open_url(url) as stream:
        return pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), codec).read().hex()

def rows(url, groups=None):
    with open_url(url) as stream:
        table = pq.ParquetFile(stream)
        for group in range(table.num_row_groups):
            yield from table.read_row_group(group, columns=["text"])["text"].to_pylist()

out = {"noise": unpacked(urls["noise.jsonl.gz"], "gzip")}
with open_url(urls["noise.jsonl.gz"]) as stream:
    size = stream.seek(0, io.SEEK_END)
    places = [random.randrange(size) for _ in range(20)]
    out["places"] = [(place, stream.seek(place), stream.tell(), stream.read(9).hex()) for place in places]
out["rows"] = list(rows(urls["rows.parquet"]))
out["waits"] = list(waits)
out["dead"] = ask(lambda: list(rows(urls["rows.parquet"].replace("rows", "dead"))))
out["dead waits"] = waits[len(out["waits"]):]
out["no file"] = ask(open_url, urls["rows.parquet"] + "x")
out["no commit"] = ask(open_url, f"hf://datasets/some/large@{'0' * 40}/rows.parquet")
out["no repository"] = ask(open_url, f"hf://datasets/some/nowhere@{'0' * 40}/rows.parquet")
out["gated"] = ask(lambda: open_url(given["gated"]).read())
out["now"] = hub_files("some/moving", None, None, ["train"])[0]
commit, files = hub_files("some/moving", None, given["old"], ["train"])
out["then"] = [commit, open_url(files["train"][0].location).read().decode()]
"""


def test_reading_survives_dropped_connections_and_reports_errors(hub, tmp_path):
    large = hub.commit("datasets/some/large", "main")[1]
    assert large is not None
    (large / "dead.parquet").write_bytes((large / "rows.parquet").read_bytes())
    hub.drops = {"noise.jsonl.gz": [10_000, 0], "rows.parquet": [100], "dead.parquet": [2**20, 2**20, *[5] * 6]}
    commits = []
    for text in ("old", "new"):
        (tmp_path / text).mkdir()
        (tmp_path / text / "train.jsonl").write_bytes(text.encode())
        commits.append(hub.publish("datasets/some/moving", tmp_path / text))
    sha = hub.commit("datasets/some/gated", "main")[0]
    given = {"old": commits[0], "gated": f"hf://datasets/some/gated@{sha}/train.jsonl"}
    out = ask(READ, hub.environment(tmp_path / "home"), tmp_path, given)

    files = REPOSITORIES["datasets/some/large"]
    assert bytes.fromhex(out["noise"]) == gzip.decompress(files["noise.jsonl.gz"])
    for place, sought, position, read in out["places"]:
        assert place == sought == position
        assert bytes.fromhex(read) == files["noise.jsonl.gz"][place : place + 9]
    assert out["rows"] == pq.read_table(pa.BufferReader(files["rows.parquet"]))["text"].to_pylist()
    assert not hub.drops["noise.jsonl.gz"] + hub.drops["rows.parquet"]
    assert out["waits"] == [1, 2, 1], "the connection was dropped three times"

    # pyarrow passes the reader's error through unchanged
    assert out["dead"]["what"].startswith("the Hugging Face hub cannot be read (peer closed connection")
    assert (
        f"hf download some/large --repo-type dataset --revision {hub.commit('datasets/some/large', 'main')[0]}"
        in (out["dead"]["remedy"])
    )
    assert sum(out["dead waits"]) < 30
    assert out["no file"]["what"] == "no such file on the hub"
    assert out["no commit"]["what"] == "no such revision"
    assert out["no repository"]["what"] == "no such repository on the hub"
    assert out["gated"]["what"] == "the repository is gated: its owner requires consent"
    assert out["now"] == commits[1]
    assert out["then"] == [commits[0], "old"]


AWAY = """
import socket

zeros = "0" * 40
questions = {
    "files": (hub_files, "allenai/c4", "en", None, ["train"]),
    "branch": (hub_files, "billion-word-benchmark/lm1b", None, "refs/convert/parquet", ["train"]),
    "open": (open_url, f"hf://datasets/allenai/c4@{zeros}/a.jsonl"),
    "cached": (hub_tokenizer, "EleutherAI/gpt-neox-20b", ["generation_config.json", "config.json"]),
    "not cached": (hub_tokenizer, "some/other"),
}
with socket.create_server(("127.0.0.1", given)):
    out = {"silent": ask(*questions["files"])}
out |= {name: ask(*question) for name, question in questions.items()}
"""

COMMANDS = {
    "files": "hf download allenai/c4 --repo-type dataset --local-dir",
    "branch": "hf download billion-word-benchmark/lm1b --repo-type dataset --revision refs/convert/parquet --local-dir",
    "open": f"hf download allenai/c4 --repo-type dataset --revision {'0' * 40} --local-dir",
    "not cached": "hf download some/other tokenizer.json --local-dir",
}


def test_an_unreachable_hub_is_an_error_with_a_remedy(asked, hub, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    away = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_ETAG_TIMEOUT": "1"}
    out = ask(AWAY, hub.environment(asked.home, **away), tmp_path, port)
    silent = out.pop("silent")
    assert silent["what"] == "the Hugging Face hub cannot be read (timed out)"
    assert silent["seconds"] < 5
    files = {"tokenizer.json": TOKENIZER, "config.json": '{"eos_token_id": 0}'}
    assert out.pop("cached") == files == asked.answers["EleutherAI/gpt-neox-20b"]
    for name, answer in out.items():
        assert answer["what"] == "the Hugging Face hub cannot be read ([Errno 111] Connection refused)"
        copy = "data.tokenizer=<its path>" if name == "not cached" else "data.source=<folder>"
        assert answer["remedy"] == f"With internet access, run `{COMMANDS[name]} <folder>`, then set {copy}."
        assert answer["seconds"] < 2
