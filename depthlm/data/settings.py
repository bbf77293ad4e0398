"""The keys of `data`: a corpus or a mixture, its tokenizer and its validation sets."""

from dataclasses import dataclass
from typing import Literal

from depthlm.counts import Count
from depthlm.fields import key

SHARD_TOKENS = 128_000_000


@dataclass(frozen=True)
class Source:
    """A source of text: a dataset of the Hugging Face hub, local files, or token files that are already prepared."""

    hub: str | None = key(None, "dataset of the Hugging Face hub from which the text is streamed", outside=True)
    subset: str | None = key(None, "hub: configuration of the dataset; null: its only or default one")
    revision: str | None = key(None, "hub: branch, tag or commit of the dataset; null: main")
    split: str | None = key(None, "hub: split to read; null: train (in data.validation: validation)")
    validation_split: str | None = key(None, "hub: split for validation; null: documents chosen by a hash")
    source: str | None = key(
        None, "folder or file of raw text, read instead of the hub; null: the default of the corpus", outside=True
    )
    files: str | None = key(
        None, "source: glob pattern of the files to read; null: all files with one of the suffixes", outside=True
    )
    validation_files: str | None = key(
        None,
        "source: glob pattern of the validation files; null: documents chosen by a hash",
        outside=True,
    )
    suffixes: list[str] | None = key(None, "suffixes of the files to read from a folder of text")
    text_field: str | None = key(None, "JSON field or parquet column that contains the text")
    path: str | None = key(None, "folder of the token files; null: data/tokens/<name>-<hash>", outside=True)
    weight: float | None = key(None, "mixture: share of the tokens, relative to the other sources", above=0)
    license: str | None = key(None, "license of the text; informational", on_resume="free")
    text_bytes: Count | None = key(None, "bytes of the text; only for estimates", minimum=1, on_resume="free")
    num_tokens: Count | None = key(None, "number of tokens; only for estimates", minimum=1, on_resume="free")
    download_bytes: Count | None = key(None, "bytes to download; only for estimates", minimum=1, on_resume="free")


@dataclass(frozen=True)
class Data(Source):
    """A corpus, tokenized from raw text; or a mixture of `sources`, whose unset keys take the values given here."""

    name: str = key("", "name of the corpus and of its validation set")
    sources: dict[str, Source] = key(
        {}, "sources of a mixture by name, each with the keys of a source: data.sources.a.hub=..."
    )
    validation: dict[str, Source] = key(
        {}, "additional validation sets by name, each with its own loss and perplexity: data.validation.a.source=..."
    )
    split: str | None = key("train", "hub: split to train on")
    suffixes: list[str] | None = key(
        [".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet"],
        "suffixes of the files to read from a folder of text",
    )
    text_field: str | None = key("text", "JSON field or parquet column that contains the text")
    tokenizer: str = key(
        "bpe",
        "bpe: trained once on the corpus; bytes: the 256 bytes; otherwise a tokenizer.json or a model of the hub",
        outside=True,
    )
    end_of_text: str | None = key(
        None,
        "token that ends a document; null: the one that generation_config.json, config.json or tokenizer_config.json "
        "beside the tokenizer.json names, else the added token with a usual name, such as <|endoftext|>",
        on_resume="logged",
    )
    max_unknown: float = key(
        0.1,
        "share of unknown tokens above which preparing is refused; from a tenth of a percent on, there is a warning",
        minimum=0,
        maximum=1,
        on_resume="free",
    )
    vocab_size: int = key(4096, "vocabulary size of the tokenizer, including the special token of `bpe`", minimum=260)
    pad_vocab_multiple: int = key(
        64, "the model's vocabulary size is that of the tokenizer, rounded up to a multiple of this", minimum=1
    )
    max_tokens: Count | None = key(
        None,
        "prepare and train on only this many tokens, from the start of the corpus (such as 10B); null: all",
        minimum=1,
    )
    fraction: float = key(1.0, "train on this fraction of the prepared tokens, from the start", above=0, maximum=1)
    validation_fraction: float = key(
        0.05, "share of the documents used for validation, chosen by a hash", above=0, maximum=0.5
    )
    held_out_by: Literal["content", "name"] = key(
        "content",
        "what the hash of a document is of. content: its text, so that copies are in the same split; name: its file, "
        "as in depthlm 0.2, whose runs it repeats",
    )
    shuffle_seed: int | None = key(None, "seed of the order of the samples; null: the seed of the run", minimum=0)
    document_mask: Literal[False, True, "bos"] = key(
        False,
        "true: attention and positions do not cross document boundaries; bos: the same, and the end-of-text token "
        "belongs to the document after it, whose first word is thus predicted from that token alone",
    )
    max_repetitions: int | None = key(
        None,
        "a training sequence in which 1 to 13 tokens repeat this many times in a row has no targets: its loss counts "
        "as 0, and only the routing of experts sees it (OLMo2: 32); null: all sequences are trained on",
        minimum=3,
    )
    on_bad_document: Literal["error", "skip"] = key(
        "error",
        "what to do with a document that is not UTF-8, not JSON, too long or has no text field. error: stop the "
        "preparation; skip: skip and count it",
    )
    max_document_bytes: Count = key(2**30, "bytes above which a document or line is bad", minimum=1, on_resume="free")
    shard_tokens: Count = key(SHARD_TOKENS, "tokens per token file", minimum=1)
    num_workers: int = key(0, "processes that prefetch batches, in the same order", minimum=0, on_resume="free")
