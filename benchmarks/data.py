"""Preparation against the bare tokenizer, and the loader against training, in one run.

    python benchmarks/data.py [--rounds 5] [--output results/...json]

Preparation is `prepare` from a file to complete token files (decompression, JSON, encoding, digests, writing). The bare
rate is `encode_batch` of the `tokenizers` library on all cores, on the same texts in memory, in the same rounds. The
loader reads a sparse file of two billion tokens with the shapes of `size=tiny` and of a 1.5B run. Training is the
training step of train.py.
"""

import gc
import json
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet

import depthlm
from benchmarks.shared.decoders import training_of
from benchmarks.shared.interleaved import measure, ratio, spread
from benchmarks.shared.reporting import Results, arguments_of, headed, parser_of, publish, result_path, table
from depthlm.data import Batches, Manifest, TokenFiles, Tokenizer, documents, loader, prepare, text_files, train_bpe
from depthlm.data.manifest import Shard
from depthlm.data.settings import Data
from depthlm.data.tokenizers import parallel_tokenizers
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed

TEXT_BYTES, VOCABULARY = 24 * 10**6, 50_304
SPARSE_TOKENS = 2 * 10**9
SHARD_TOKENS = 128 * 10**6
# characters per call of the bare library, which is slower with fewer
BARE_BATCH = 2**21
# characters of a document as short as LM1B's
SENTENCE = 130


def texts() -> list[str]:
    """Return documents of the standard library, repeated if needed, each with another first line."""
    source = Data(name="stdlib", source=sysconfig.get_paths()["stdlib"], suffixes=[".py"])
    repeated: list[str] = []
    size = 0
    while size < TEXT_BYTES:
        for _, text in documents(text_files("stdlib", source).train, "text"):
            repeated.append(f"{len(repeated)}\n{text}")
            size += len(text.encode())
            if size >= TEXT_BYTES:
                break
    return repeated


def preparation(folder: Path, corpus: list[str], tokenizer: Tokenizer, rounds: int) -> dict[str, Any]:
    """Measure the bytes of text per second of the bare library and of `prepare`, for each file format."""
    folder.mkdir()
    tokenizer.save(folder)
    total = sum(len(text.encode()) for text in corpus)
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in corpus)
    (folder / "corpus.jsonl.zst").write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    pyarrow.parquet.write_table(pa.table({"text": corpus}), folder / "corpus.parquet", row_group_size=1000)
    batches: list[list[str]] = [[]]
    length = 0
    for text in corpus:
        batches[-1].append(text)
        length += len(text)
        if length >= BARE_BATCH:
            batches.append([])
            length = 0
    number = iter(range(10**6))

    def ours(name: str) -> None:
        data = Data(
            name="corpus", source=str(folder / name), tokenizer=str(folder / "tokenizer.json"),
            path=str(folder / f"tokens-{next(number)}"), validation_fraction=0.01,
        )  # fmt: skip
        (tokens,) = prepare(data, progress=False).values()
        train, (validation,) = (manifest := Manifest.read(tokens)).train, manifest.validation.values()
        assert train.bytes + validation.bytes == total

    def bare(tokenizer: Tokenizer, fast: bool) -> None:
        encode = tokenizer._encoder.encode_batch_fast if fast else tokenizer._encoder.encode_batch
        with parallel_tokenizers():
            for batch in batches:
                encode(batch, add_special_tokens=False)

    contenders = {
        "tokenizers": lambda: bare(tokenizer, fast=False),
        "tokenizers again": lambda: bare(tokenizer, fast=False),
        "tokenizers, without offsets": lambda: bare(tokenizer, fast=True),
        "prepare, jsonl.zst": lambda: ours("corpus.jsonl.zst"),
        "prepare, parquet": lambda: ours("corpus.parquet"),
    }
    seconds = measure(contenders, rounds, steps=1, warmup=1)
    return {
        "bytes": total,
        "documents": len(corpus),
        "vocabulary": tokenizer.vocab_size,
        "noise": spread(seconds, "tokenizers", "tokenizers again"),
        "contenders": {
            name: {
                "megabytes_per_second": total / statistics.median(times) / 1e6,
                "ratio": ratio(seconds, name, "tokenizers"),
                "seconds": times,
            }
            for name, times in seconds.items()
        },
    }


def sparse_tokens(folder: Path, count: int) -> TokenFiles:
    """Create sparse token files of this many zeros, which take no disk space."""
    shards = []
    for start in range(0, count, SHARD_TOKENS):
        shard = Shard(f"sparse-{count}-{len(shards):05d}.bin", min(SHARD_TOKENS, count - start), "")
        with open(folder / shard.name, "wb") as file:
            file.truncate(2 * shard.tokens)
        shards.append(shard)
    return TokenFiles(folder, shards, "uint16")


def reading(tokens: TokenFiles, sequence_length: int, batch_size: int, steps: int, workers: int) -> dict[str, Any]:
    """Measure the tokens per second of the loader, and the growth of memory while it reads."""
    batches = Batches({"sparse": tokens}, sequence_length=sequence_length, batch_size=batch_size, seed=0)
    feed = loader(batches, 0, steps + 4, num_workers=workers)
    for _ in range(4):
        next(feed)
    gc.collect()
    # memory that is in use, including that of mapped files
    memory = psutil.Process().memory_info
    before, started = memory().rss, time.perf_counter()
    for _ in range(steps):
        next(feed)
    seconds, resident = time.perf_counter() - started, memory().rss
    return {
        "corpus_tokens": len(tokens), "sequence_length": sequence_length, "batch_size": batch_size, "workers": workers,
        "tokens_per_second": steps * batch_size * sequence_length / seconds,
        "memory_growth_mib": (resident - before) / 2**20, "resident_mib": resident / 2**20,
    }  # fmt: skip


def training(steps: int) -> float:
    """Return the tokens per second of training size=tiny with the default configuration, in the fastest step."""
    trained = training_of(depthlm.compose(["size=tiny", "tracker=none"]), start_distributed(ranks()))
    seconds = measure({"step": trained.step}, rounds=steps, steps=1, warmup=0)["step"]
    return trained.plan.tokens_per_step / min(seconds)


def markdown(results: Results) -> str:
    texts = []
    for kind, result in results["preparing"].items():
        mean, noise = result["bytes"] / result["documents"], result["noise"]
        rows = (
            (name, f"{line['megabytes_per_second']:.2f}", f"{line['ratio']:.3f}")
            for name, line in result["contenders"].items()
        )
        note = f"{kind} of {mean:,.0f} bytes; two measurements of the same code differ by {noise:.1%}"
        texts.append(headed(results, table(("preparation", "MB/s", "of the bare rate"), rows), note))
    rows = (
        (name, *(f"{line[key]:{form}}" for key, form in READING.items())) for name, line in results["loader"].items()
    )
    note = f"training tiny: {results['training_tokens_per_second']:,.0f} tokens/s"
    header = ("loader", "tokens/s", "times training", "memory grew by MiB")
    return "\n\n".join([*texts, headed(results, table(header, rows), note)])


# the columns of the loader, and their formats
READING = {"tokens_per_second": ",.0f", "times_training": ",.0f", "memory_growth_mib": ".1f"}


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    arguments = arguments_of(parser, markdown)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        full_texts = texts()
        sentences = [text[i : i + SENTENCE] for text in full_texts for i in range(0, len(text), SENTENCE)]
        with parallel_tokenizers():
            tokenizer = train_bpe(full_texts[: len(full_texts) // 3], VOCABULARY)
        prepared = {
            name: preparation(folder / name, corpus, tokenizer, arguments.rounds)
            for name, corpus in {"documents": full_texts, "sentences": sentences}.items()
        }
        large, small = sparse_tokens(folder, SPARSE_TOKENS), sparse_tokens(folder, SPARSE_TOKENS // 1000)
        tiny = depthlm.compose(["size=tiny"]).training
        shapes = {"tiny": (tiny.sequence_length, tiny.batch_size, 2000), "1.5b": (2048, 1024, 40)}
        loaded = {
            f"{shape}, {len(tokens) / 1e6:,.0f}M tokens, {workers} workers": reading(tokens, *size, workers)
            for shape, size in shapes.items()
            for tokens in (small, large)
            for workers in (0, 2)
        }
    trained = training(steps=6)
    for line in loaded.values():
        line["times_training"] = line["tokens_per_second"] / trained
    results = {"preparing": prepared, "loader": loaded, "training_tokens_per_second": trained}
    publish(arguments.output or result_path("data"), results, markdown)


if __name__ == "__main__":
    main()
