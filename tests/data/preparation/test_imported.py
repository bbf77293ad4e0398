"""Token files made from ids that were tokenized elsewhere."""

import errno
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers

from depthlm.data import Manifest, TokenFiles, open_corpus, prepare, verify
from depthlm.data.preparation import imported
from depthlm.data.preparation.imported import Import, import_tokens
from depthlm.data.settings import Data, Source
from depthlm.data.tokenizers import Tokenizer, load_tokenizer
from depthlm.errors import DataError

from .preparing import content, left_over

END = 256
# three documents of a tokenizer of bytes; the second is empty, the last is not ASCII
IDS = [*b"one two", END, END, *"naïve Ω".encode(), END]


def raw(name: str, ids: Any, dtype: str = "<u4") -> Path:
    """Write ids without a header."""
    Path(name).write_bytes(np.asarray(ids, dtype).tobytes())
    return Path(name)


def job(*files: Path, tokenizer: str = "bytes", **settings: Any) -> Import:
    given = {"dtype": "uint32", "folder": Path("made"), **settings}
    return Import(files, tokenizer=load_tokenizer(tokenizer, None), **given)


def tokens_of(folder: Path, split: str) -> list[int]:
    manifest = Manifest.read(folder)
    parts = manifest.train if split == "train" else next(iter(manifest.validation.values()))
    tokens = TokenFiles(folder, parts.files, manifest.dtype, vocab_size=manifest.vocab_size)
    return tokens.read(0, len(tokens)).tolist()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_imported_ids_are_the_token_files_that_the_text_gives(local, tokenizer):
    (folder,) = prepare(local(tokenizer=tokenizer, path="prepared")).values()
    expected = Manifest.read(folder)
    file = raw("ids.npy", tokens_of(folder, "train"))
    manifest = import_tokens(job(file, tokenizer="bytes" if tokenizer == "bytes" else str(folder / "tokenizer.json")))
    assert tokens_of(Path("made"), "validation") == tokens_of(folder, "train")
    split, text = manifest.validation["made"], expected.train
    assert (split.tokens, split.documents, split.bytes) == (text.tokens, text.documents, text.bytes)
    assert (manifest.dtype, manifest.tokenizer) == (expected.dtype, expected.tokenizer)
    # data.vocab_size is more than the BPE has
    assert manifest.vocab_size <= expected.vocab_size
    assert manifest.train.tokens == 0
    verify("made")
    # the files that preparing leaves, no others
    assert {*content(Path("made"))} == {"manifest.json", "tokenizer.json", "validation-made-00000.bin"}
    assert not {name for name in left_over(Path("made")) if "partial" in name}


@pytest.mark.parametrize("chunk", [1, 2**22])
def test_bytes_of_a_tokenizer_whose_tokens_are_not_bytes_are_those_of_the_decoded_documents(monkeypatch, chunk):
    monkeypatch.setattr(imported, "CHUNK", chunk)
    texts = ["one two three", "naïve Ω and four", "five", "", "three and five"]
    # not trained: the order of a trained vocabulary varies, and with it which documents are held out
    letters = sorted({*"".join(texts).replace(" ", "▁")})
    pieces = [("</s>", 0.0), ("?", -20.0), ("▁three", -2.0), *((letter, -5.0) for letter in letters)]
    encoder = Encoder(models.Unigram(pieces, unk_id=1))
    encoder.add_special_tokens(["</s>"])
    encoder.pre_tokenizer, encoder.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    encoder.save("tokenizer.json")
    tokenizer = Tokenizer.load("tokenizer.json")
    ids = [number for text in texts for number in [*tokenizer.encode_batch([text])[0], tokenizer.end_of_text]]
    # the second file begins within the first document, with a space
    cut = next(number for number in range(1, len(ids)) if encoder.id_to_token(ids[number]).startswith("▁"))
    files = raw("a", ids[:cut]), raw("b", ids[cut:])
    manifest = import_tokens(job(*files, tokenizer="tokenizer.json", held_out=0.5))
    documents = [np.array(tokenizer.encode_batch([text])[0] + [tokenizer.end_of_text], "<i8") for text in texts]
    is_held = [int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest()) < 2**63 for ids in documents]
    assert {*is_held} == {False, True}
    for split, held in ((manifest.train, False), (manifest.validation["made"], True)):
        expected = [len(text.encode()) for text, is_in in zip(texts, is_held, strict=True) if is_in == held]
        assert (split.documents, split.bytes) == (len(expected), sum(expected))


def test_training_text_holds_out_whole_documents(monkeypatch):
    monkeypatch.setattr(imported, "CHUNK", 7)
    documents = [[*f"document {number % 100}".encode(), END] for number in range(200)]
    file = raw("ids", [token for document in documents for token in document])
    manifest = import_tokens(job(file, held_out=0.2))
    held = manifest.validation["made"].documents
    assert 20 < held < 60
    assert manifest.train.documents == 200 - held
    train, validation = (
        {bytes(part) for part in np.split(ids, np.flatnonzero(ids == END) + 1)}
        for ids in (np.array(tokens_of(Path("made"), split)) for split in ("train", "validation"))
    )
    # copies of a document are in the same split
    assert train.isdisjoint(validation - {b""})
    assert (train | validation) - {b""} == {bytes(np.array(document)) for document in documents}
    corpus = open_corpus(Data(name="published", path="made"))
    assert corpus.tokens == manifest.train.tokens
    assert corpus.unigram_entropy is not None


def test_a_validation_set_of_a_run_is_a_folder_of_imported_ids(local):
    import_tokens(job(raw("ids", IDS), folder=Path("olmo/ice")))
    data = local(tokenizer="bytes", validation={"ice": Source(path="olmo/ice")})
    prepare(data)
    corpus = open_corpus(data)
    assert list(corpus.validation) == ["local", "ice"]
    assert corpus.validation["ice"].read(0, len(IDS)).tolist() == IDS
    other = local(validation={"ice": Source(path="olmo/ice")})
    with pytest.raises(DataError, match="another tokenizer"):
        prepare(other)


def test_a_header_of_npy_says_the_dtype_and_the_shape():
    for number, dtype in enumerate(("<u2", "<i8")):
        np.save("ids.npy", np.array(IDS, dtype))
        import_tokens(job(Path("ids.npy"), dtype=None, folder=Path(f"made{number}")))
        assert tokens_of(Path(f"made{number}"), "validation") == IDS
    for shape, dtype in (((4, 4), "<u4"), ((4,), "<f4"), ((4,), "<u2")):
        np.save("ids.npy", np.full(shape, END, dtype))
        with pytest.raises(DataError, match=f"an array of {len(shape)} dimensions and dtype {np.dtype(dtype)}"):
            import_tokens(job(Path("ids.npy")))


def header(text: str) -> Path:
    """Write a .npy of the ids with this header."""
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    Path("ids.npy").write_bytes(head + np.array(IDS, "<u4").tobytes())
    return Path("ids.npy")


@pytest.mark.parametrize(
    ("write", "settings", "words"),
    [
        (lambda: raw("ids", IDS[1:], "<u2"), {}, ["ids", "and the vocabulary has 258 tokens", "Check --dtype"]),
        (lambda: raw("ids", [1, 2, -1, END], "<i4"), {"dtype": "int32"}, ["id -1 at position 2"]),
        (lambda: raw("ids", IDS[:-1]), {}, ["the last id is 169, not the end of text '<|endoftext|>' (id 256)"]),
        (lambda: raw("ids", IDS), {"dtype": None}, ["no header", "Set --dtype"]),
        (lambda: raw("ids", [*b"abcde"], "u1"), {}, ["5 bytes are no whole number of ids of 4 bytes"]),
        (lambda: Path("absent"), {}, ["absent", "cannot read ids"]),
        (lambda: raw("ids", IDS), {"held_out": 1e-6}, ["of 3 documents, 3 are for training and 0 for validation"]),
        (lambda: header("{'descr': '<u4', 'fortran_order': False, 'shape': (99999999999999,)}"), {}, ["says 99,999,"]),
        (lambda: header("{'descr': '|O', 'fortran_order': False, 'shape': (19,)}"), {}, ["dtype object"]),
        (lambda: header("(" * 9000), {}, ["header of a .npy cannot be read"]),
        (lambda: Path("/dev/zero"), {}, ["not a regular file"]),
    ],
)
def test_ids_that_cannot_be_token_files_are_refused(write, settings, words):
    with pytest.raises(DataError) as caught:
        import_tokens(job(write(), **settings))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not Path("made").exists()


def rewrite(file: Path) -> None:
    status = file.stat()
    file.write_bytes(np.array([*b"another", *IDS[7:]], "<u4").tobytes())
    # a writer may restore the time, or the clock may be coarse
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "chunk"),
    [(lambda file: file.write_bytes(file.read_bytes()[:-4]), 4), (rewrite, 2**22)],
)
def test_a_file_that_changes_while_it_is_imported_is_refused(monkeypatch, chunk, change):
    monkeypatch.setattr(imported, "CHUNK", chunk)
    file, written = raw("ids", IDS), imported._write

    def change_and_write(*arguments: Any) -> Manifest:
        change(file)
        return written(*arguments)

    monkeypatch.setattr(imported, "_write", change_and_write)
    with pytest.raises(DataError, match="the file changed while it was read"):
        import_tokens(job(file, held_out=0.5))
    assert not Path("made").exists()


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch):
    with pytest.raises(DataError, match="File name too long"):
        import_tokens(job(raw("ids", IDS), folder=Path("x" * 300)))
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(imported.SplitWriter, "add", Mock(side_effect=full))
        with pytest.raises(DataError, match="No space left on device"):
            import_tokens(job(Path("ids")))
    import_tokens(job(Path("ids")))
    assert tokens_of(Path("made"), "validation") == IDS


def test_the_same_import_again_changes_nothing_and_another_is_refused():
    files = raw("a", IDS[:9]), raw("b", IDS[9:])
    first = import_tokens(job(*files))
    before = {file: file.stat().st_mtime_ns for file in Path("made").iterdir()}
    assert import_tokens(job(*files)) == first
    assert {file: file.stat().st_mtime_ns for file in Path("made").iterdir()} == before
    for other in (job(*reversed(files)), job(raw("b", [*IDS[9:], END]), files[0])):
        with pytest.raises(DataError, match="other token files"):
            import_tokens(other)
