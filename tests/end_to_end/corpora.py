"""Small corpora with the file formats, schemas and layouts of the real ones, and tokenizers in place of theirs."""

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from depthlm.data import Manifest, Tokenizer
from depthlm.data.corpora.documents import held_out_share, is_validation

Row = dict[str, Any]

WORDS = (
    "the of and to in a is that for it as was with by on not river stone garden window letter morning question answer "
    "teacher market winter summer carried opened found wrote counted measured small large quiet early careful between "
    "under across because although therefore while seven twelve percent theorem function naïve café Ω 東京"
)
# Strings that a tokenizer must treat as text, and white space that must be preserved.
ODDITIES = ["<|endoftext|>", "“quoted”", "x = y**2\n\tz -= 1", "a  b", "line\r\nline", "🙂"]


@dataclass(frozen=True)
class Corpus:
    """A corpus on the hub.

    repo: with @branch if it is not main. files: the rows of each file, by path; a row's text is row["text"].
    parts: for each source, the patterns of its training files and of its held-out files; None: hold out by a hash.
    decoys: further files that must not be read.
    """

    repo: str
    tokenizer: str
    files: dict[str, list[Row]]
    parts: Mapping[str, tuple[str, str | None]]
    configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    decoys: dict[str, list[Row]] = field(default_factory=dict)

    def documents(self, source: str, fraction: float) -> tuple[list[str], list[str]]:
        """Return the training texts and the held-out texts, in the order that the token files must have."""
        train, held_out = self.parts[source]
        texts = list(self._texts(train))
        if held_out is not None:
            held_out_texts = list(self._texts(held_out))
            return [text for text in texts if text not in held_out_texts], held_out_texts
        fraction = held_out_share(texts, fraction)
        split: tuple[list[str], list[str]] = ([], [])
        for text in texts:
            split[is_validation(text, fraction)].append(text)
        return split

    def _texts(self, pattern: str) -> Iterator[str]:
        for path in sorted(self.files):
            if fnmatchcase(path, pattern):
                yield from (row["text"] for row in self.files[path])

    def write(self, folder: Path) -> Path:
        """Write the repository, as on the hub and in a mirror made by `hf download`, and return its folder."""
        for path, rows in (self.files | self.decoys).items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(_content(path, rows))
        configs = [
            {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
            for name, splits in self.configs.items()
        ]
        # JSON is YAML.
        head = f"configs: {json.dumps(configs)}\n" if configs else ""
        (folder / "README.md").write_text(f"---\nlicense: odc-by\n{head}---\n# A corpus\n")
        return folder


@dataclass(frozen=True)
class Mirrors:
    """The content of the hub, as folders below a root: datasets by the name of the corpus, models by their own name."""

    corpora: Mapping[str, Corpus]
    root: Path

    def __post_init__(self) -> None:
        for name, corpus in self.corpora.items():
            corpus.write(self.root / name)
        everything = [row["text"] for c in self.corpora.values() for rows in c.files.values() for row in rows]
        for model, text in tokenizers(everything).items():
            self.tokenizer(model).parent.mkdir(parents=True)
            self.tokenizer(model).write_text(text)

    def tokenizer(self, model: str) -> Path:
        return self.root / model / "tokenizer.json"

    def overrides(self, name: str) -> list[str]:
        """Return the overrides that read the corpus from its mirror."""
        tokenizer = self.tokenizer(self.corpora[name].tokenizer)
        return [f"data={name}", f"data.source={self.root / name}", f"data.tokenizer={tokenizer}"]

    def repositories(self) -> dict[str, Path]:
        """Return every folder, keyed by its name on the hub."""
        datasets = {f"datasets/{corpus.repo}": self.root / name for name, corpus in self.corpora.items()}
        return datasets | {corpus.tokenizer: self.root / corpus.tokenizer for corpus in self.corpora.values()}


def documents_of(folder: Path, split: str) -> list[str]:
    """Return the text of each document in a split of token files, without its end of text."""
    manifest, tokenizer = Manifest.read(folder), Tokenizer.load(folder)
    dtype, files = np.dtype(manifest.dtype).newbyteorder("<"), manifest.splits()[split].files
    ids = np.concatenate([np.fromfile(folder / file.name, dtype) for file in files])
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(part[:-1]) for part in np.split(ids, ends[:-1] + 1)]


def prose(chance: random.Random, words: int) -> str:
    """Return text of `words` words, some of them ODDITIES, in sentences and lines."""
    usual = WORDS.split()
    written = [chance.choice(usual) if chance.random() < 0.97 else chance.choice(ODDITIES) for _ in range(words)]
    for place in range(9, words, 10):
        written[place] += chance.choice([".", ",", ".\n", ".\n\n"])
    return " ".join(written)


def corpora() -> dict[str, Corpus]:
    """Return the five corpora, by the names of their configuration files."""
    return {"c4": _c4(), "pile": _pile(), "fineweb_edu": _fineweb_edu(), "lm1b": _lm1b(), "olmo2_mix": _olmo2_mix()}


def _texts(key: str, count: int, words: int = 80) -> list[str]:
    chance = random.Random(key)
    return [prose(chance, chance.randint(words // 2, words)) for _ in range(count)]


def _c4() -> Corpus:
    def rows(path: str, count: int) -> list[Row]:
        about = {"timestamp": "2019-04-25T12:57:54Z", "url": "https://example.com/page"}
        return [{"text": text} | about for text in _texts(path, count)]

    names = [f"c4-train.{number:05}-of-01024.json.gz" for number in range(3)]
    held_out = "en/c4-validation.00000-of-00008.json.gz"
    return Corpus(
        "allenai/c4",
        "google-t5/t5-base",
        {f"en/{name}": rows(name, 20) for name in names} | {held_out: rows(held_out, 6)},
        {"c4": ("en/c4-train.*", "en/c4-validation.*")},
        {
            name: {"train": f"{name}/c4-train.*.json.gz", "validation": f"{name}/c4-validation.*.json.gz"}
            for name in ("en", "en.noclean")
        },
        {f"en.noclean/c4-{split}.00000-of-07168.json.gz": rows(split, 4) for split in ("train", "validation")},
    )


def _pile() -> Corpus:
    def rows(path: str, count: int) -> list[Row]:
        sets = ["Pile-CC", "Wikipedia (en)", "ArXiv", "Github", "StackExchange"]
        return [{"text": t, "meta": {"pile_set_name": sets[i % 5]}} for i, t in enumerate(_texts(path, count))]

    files = {f"train/{number:02}.jsonl.zst": rows(f"train {number}", 20) for number in range(3)}
    files["val.jsonl.zst"] = rows("val", 6)
    decoys = {"test.jsonl.zst": rows("test", 6)}
    parts = {"pile": ("train/*", "val.*")}
    return Corpus("monology/pile-uncopyrighted", "EleutherAI/gpt-neox-20b", files, parts, decoys=decoys)


def _fineweb_edu() -> Corpus:
    def rows(path: str, count: int) -> list[Row]:
        about = {
            "dump": "CC-MAIN-2024-10", "url": "https://example.com/lesson", "language": "en", "language_score": 0.98,
            "file_path": "s3://commoncrawl/crawl-data/CC-MAIN-2024-10/segments/0.warc.gz", "score": 3.1, "int_score": 3,
        }  # fmt: skip
        return [
            {"text": text, "id": f"<urn:uuid:{number:032x}>", "token_count": len(text) // 4} | about
            for number, text in enumerate(_texts(path, count))
        ]

    files = {f"sample/100BT/{number:03}_00000.parquet": rows(f"100BT {number}", 30) for number in range(2)}
    decoys = {"data/CC-MAIN-2024-10/000_00000.parquet": rows("all", 3), "sample/10BT/000_00000.parquet": rows("10", 3)}
    configs = {"default": {"train": "data/*/*"}} | {
        f"sample-{size}": {"train": f"sample/{size}/*"} for size in ("10BT", "100BT", "350BT")
    }
    parts = {"fineweb_edu": ("sample/100BT/*", None)}
    return Corpus("HuggingFaceFW/fineweb-edu", "EleutherAI/gpt-neox-20b", files, parts, configs, decoys)


def _lm1b() -> Corpus:
    def rows(path: str, count: int) -> list[Row]:
        return [{"text": f"{' '.join(text.split())} ."} for text in _texts(path, count, words=30)]

    files = {f"plain_text/train/{number:04}.parquet": rows(f"train {number}", 40) for number in range(2)}
    files["plain_text/test/0000.parquet"] = rows("test", 15)
    parts = {"lm1b": ("plain_text/train/*", "plain_text/test/*")}
    return Corpus("billion-word-benchmark/lm1b@refs/convert/parquet", "google-t5/t5-base", files, parts)


def _olmo2_mix() -> Corpus:
    def rows(source: str, path: str, count: int) -> list[Row]:
        about = {"source": source, "added": "2024-11-24T00:00:00.000Z", "created": "2020-01-01T00:00:00.000Z"}
        return [
            {"id": f"{path}-{i}", "text": t, "metadata": {"length": len(t)}} | about
            for i, t in enumerate(_texts(path, count))
        ]

    deep = "data/dclm/raw/hero-run-fasttext_for_HF/filtered/OH_eli5_vs_rw_v2_bigram_200k_train/processed_data"
    paths = {
        "dclm": [f"{deep}/global-shard_0{n}_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst" for n in "12"]
    }
    for name in ("starcoder", "pes2o", "arxiv", "open-web-math", "algebraic-stack", "wiki"):
        paths[name] = [f"data/{name}/{name}-{number:04}.json.gz" for number in range(2)]
    files = {path: rows(name, path, 8) for name in paths for path in paths[name]}
    configs = {"default": {"train": "data/**/*"}} | {name: {"train": f"data/{name}/**/*"} for name in paths}
    parts = {name: (f"data/{name}/*", None) for name in paths}
    return Corpus("allenai/olmo-mix-1124", "allenai/dolma2-tokenizer", files, parts, configs)


def _content(path: str, rows: list[Row]) -> bytes:
    if path.endswith(".parquet"):
        sink = pa.BufferOutputStream()
        # several row groups, as in any large file
        pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
        return sink.getvalue().to_pybytes()
    lines = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    return gzip.compress(lines, mtime=0) if path.endswith(".gz") else pa.compress(lines, codec="zstd", asbytes=True)


def tokenizers(texts: Iterable[str]) -> dict[str, str]:
    """Train each model's tokenizer.json on the texts, with the real ids of the end of text and of the last token."""
    texts = list(texts)
    return {
        "EleutherAI/gpt-neox-20b": _byte_level(texts, {"<|endoftext|>": 0, "<|padding|>": 1, " " * 24: 50276}),
        "allenai/dolma2-tokenizer": _byte_level(texts, {"<|endoftext|>": 100257, "<|pad|>": 100277}),
        "google-t5/t5-base": _byte_level(texts, {"<pad>": 0, "</s>": 1, "<extra_id_0>": 32099}),
    }


def _byte_level(texts: list[str], special: dict[str, int]) -> str:
    encoder = Encoder(models.BPE())
    encoder.normalizer = normalizers.NFC()
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    encoder.train_from_iterator(texts, trainer)
    tokenizer = json.loads(encoder.to_str())
    model = tokenizer["model"]
    # the first ids are reserved for the special tokens
    model["vocab"] = {token: number + 2 for token, number in model["vocab"].items()} | special
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] = [{"id": number, "content": token} | flags for token, number in special.items()]
    return json.dumps(tokenizer)
