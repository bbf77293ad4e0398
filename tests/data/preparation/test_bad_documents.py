"""Documents that are not text, and files that cannot be read: errors, or skipped and counted."""

import dataclasses
from pathlib import Path

import pytest

from depthlm.data import DataError, Manifest, prepare
from depthlm.data.corpora.documents import REASONS

from .preparing import content


def test_a_file_that_cannot_be_read_is_an_error_also_where_bad_documents_are_skipped(local, text_folder):
    (text_folder / "part0/0.txt").write_bytes("Ω".encode("utf-16"))
    with pytest.raises(DataError, match=r"^the file is UTF-16, not UTF-8: .*part0/0\.txt\. Either fix the file"):
        prepare(local())
    (text_folder / "part2/2.jsonl.gz").write_bytes(b"not compressed")
    data = local(suffixes=[".txt", ".jsonl.gz"], text_field="text")
    with pytest.raises(DataError, match=r"^cannot be read to its end .*2\.jsonl\.gz\. Download or copy"):
        prepare(dataclasses.replace(data, on_bad_document="skip"))


def test_a_bad_document_is_an_error_or_is_skipped_and_counted_as_configured(local, text_folder, capsys):
    clean = content(prepare(local(path="clean"))["local"])
    (text_folder / "zz.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="not UTF-8") as caught:
        prepare(local(path="tokens"))
    assert str(text_folder / "zz.txt") in str(caught.value)
    assert "data.on_bad_document=skip" in caught.value.remedy
    assert not Path("tokens").exists()
    folder = prepare(local(path="tokens", on_bad_document="skip"))["local"]
    assert f"skipped 1 {REASONS['utf8']}" in capsys.readouterr().err
    assert Manifest.read(folder).left_out == {"utf8": 1}
    kept = content(folder)
    assert {name: kept[name] for name in kept if name != "manifest.json"} == {
        name: clean[name] for name in clean if name != "manifest.json"
    }
