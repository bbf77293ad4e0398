"""Small repositories in the layouts of the real ones, and queries about them that run in a separate process."""

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PRELUDE = """
import json, sys, time
from depthlm.errors import DataError
from depthlm.data.corpora.hub import hub_files, hub_tokenizer, open_url

def ask(call, *args):
    start = time.monotonic()
    try:
        return call(*args)
    except DataError as error:
        return {"what": error.what, "where": str(error.where), "remedy": error.remedy,
                "seconds": time.monotonic() - start}

given = json.loads(sys.argv[1])
"""

# The queries for each layout: repository, subset, revision, splits.
QUESTIONS: dict[str, list[Any]] = {
    "c4": ["allenai/c4", "en", None, ["train", "validation"]],
    "c4, no subset": ["allenai/c4", None, None, ["train"]],
    "fineweb, no validation": ["HuggingFaceFW/fineweb-edu", "sample-10BT", None, ["train", "validation"]],
    "lm1b, no such folder": ["billion-word-benchmark/lm1b", "en", "refs/convert/parquet", ["train"]],
    "lm1b script": ["billion-word-benchmark/lm1b", None, None, ["train"]],
    "mixed": ["some/mixed", None, None, ["train", "validation"]],
    "null": ["some/null", None, None, ["train"]],
    "gated": ["some/gated", None, None, ["train"]],
    "nowhere": ["some/nowhere", None, None, ["train"]],
}

TOKENIZER = '{"version": "1.0", "ä": 1}'


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def gz(*texts: str) -> bytes:
    return gzip.compress(lines(*texts))


def zst(*texts: str) -> bytes:
    return pa.compress(lines(*texts), codec="zstd", asbytes=True)


def parquet(*texts: str, rows: int = 1000) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": list(texts)}), sink, row_group_size=rows)
    return sink.getvalue().to_pybytes()


def readme(configs: Mapping[str, Mapping[str, str]]) -> bytes:
    entries = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
        for name, splits in configs.items()
    ]
    # JSON is YAML.
    return f"---\nlicense: odc-by\nconfigs: {json.dumps(entries)}\n---\n# A corpus\n".encode()


REPOSITORIES: dict[str, dict[str, bytes]] = {
    "datasets/allenai/c4": {
        "README.md": readme(
            {
                "en": {"train": "en/c4-train.*.json.gz", "validation": "en/c4-validation.*.json.gz"},
                "en.noclean": {"train": "en.noclean/c4-train.*.json.gz"},
            }
        ),
        **{f"en/c4-train.{i:05}-of-01024.json.gz": gz(f"train {i}") for i in range(5)},
        "en/c4-validation.00000-of-00008.json.gz": gz("validation"),
        "en.noclean/c4-train.00000-of-07168.json.gz": gz("noclean"),
    },
    "datasets/HuggingFaceFW/fineweb-edu": {
        "README.md": readme({"default": {"train": "data/*/*"}, "sample-10BT": {"train": "sample/10BT/*"}}),
        "data/CC-MAIN-2013-20/train-00000-of-00014.parquet": parquet("2013"),
        "data/CC-MAIN-2024-10/000_00000.parquet": parquet("2024"),
        "sample/10BT/000_00000.parquet": parquet("a"),
        "sample/10BT/001_00000.parquet": parquet("b"),
        "sample/100BT/000_00000.parquet": parquet("c"),
    },
    "datasets/billion-word-benchmark/lm1b": {
        "README.md": b"---\ndataset_info:\n  config_name: plain_text\n---\n",
        "lm1b.py": b"raise SystemExit('code of the repository')",
        "dataset_infos.json": b"{}",
    },
    "datasets/billion-word-benchmark/lm1b@refs/convert/parquet": {
        "plain_text/train/0000.parquet": parquet("train 0"),
        "plain_text/train/0001.parquet": parquet("train 1"),
        "plain_text/test/0000.parquet": parquet("test"),
    },
    "datasets/some/mixed": {
        "LICENSE.txt": b"free",
        "train/a.json.gz": gz("a"),
        "train/b.jsonl.zst": zst("b"),
        "train/val-like.jsonl": lines("c"),
        "val/d.parquet": parquet("d"),
        ".hidden/train/e.jsonl": lines("e"),
    },
    "datasets/some/gated": {"README.md": b"---\nextra_gated_prompt: agree\n---\n", "train.jsonl": lines("secret")},
    "datasets/some/null": {"train.jsonl": lines("a")},
    "datasets/some/large": {
        "noise.jsonl.gz": gzip.compress(random.Random(0).randbytes(200_000)),
        "rows.parquet": parquet(*(f"row {i} {random.Random(i).randbytes(50).hex()}" for i in range(3000))),
    },
    "EleutherAI/gpt-neox-20b": {"tokenizer.json": TOKENIZER.encode(), "config.json": b'{"eos_token_id": 0}'},
    "some/model": {"config.json": b"{}"},
}


def ask(code: str, environment: Mapping[str, str], folder: Path, given: Any = None) -> Any:
    """Run the code in a new process, since the libraries read the endpoint on import, and return its `out`."""
    script = f"{PRELUDE}{code}\nprint('\\n' + json.dumps(out, default=bytes.decode))"
    command = [sys.executable, "-c", script, json.dumps(given)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])
