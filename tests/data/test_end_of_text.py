"""The end of text is the wanted token, else the one that a file names, else a special token of a usual name."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Encoder

from depthlm.data import DataError, Tokenizer, open_corpus, prepare, token_folders
from depthlm.data.settings import Data, Source

# ids 0 to 3 are in the model's vocabulary, 4 and 5 are added special tokens, 6 is added and not special
VOCABULARY = {"</s>": 0, "a": 1, "one": 2, "<unk>": 3}


def write(folder: Path, special: tuple[str, ...] = ("<|im_end|>", "<|stop|>"), **files: Any) -> Path:
    """Write a tokenizer.json and the files beside it; returns the tokenizer.json."""
    encoder = Encoder(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    encoder.add_special_tokens(list(special))
    encoder.add_tokens([AddedToken("<end>", special=False)])
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save(str(folder / "tokenizer.json"))
    for name, record in files.items():
        (folder / f"{name}.json").write_text(record if isinstance(record, str) else json.dumps(record))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    ("files", "token", "source"),
    [
        ({}, "<|im_end|>", "its usual name"),
        ({"tokenizer_config": {"eos_token": "<|stop|>"}}, "<|stop|>", "tokenizer_config.json"),
        ({"config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": "</s>"}}, "<|stop|>", "config.json"),
        ({"generation_config": {"eos_token_id": [6, 4]}, "config": {"eos_token_id": 5}}, "<end>",
         "generation_config.json"),
        # neither ids of ordinary tokens, nor ids beyond the vocabulary, nor files of something else
        ({"generation_config": {"eos_token_id": 1}, "config": {"eos_token_id": [2, 99, None, True]}}, "<|im_end|>",
         "its usual name"),
        ({"generation_config": "{", "config": [1], "tokenizer_config": {"eos_token": "no such"}}, "<|im_end|>",
         "its usual name"),
    ],
)  # fmt: skip
def test_the_files_beside_a_tokenizer_name_its_end_of_text(tmp_path, files, token, source):
    tokenizer = Tokenizer.load(write(tmp_path, **files))
    assert (tokenizer.end.token, tokenizer.end.source) == (token, source)
    assert tokenizer.end_of_text == tokenizer.end.id == tokenizer.vocabulary()[token]
    # the same after it was saved, where those files are not
    (tmp_path / "saved").mkdir()
    assert Tokenizer.load(tokenizer.save(tmp_path / "saved")).end_of_text == tokenizer.end_of_text


def test_an_ordinary_token_is_taken_only_if_it_is_asked_for(tmp_path):
    file = write(tmp_path, special=("<|stop|>",))
    with pytest.raises(
        DataError, match=r"no end-of-text token among the added.*data\.end_of_text.*special tokens: '<\|stop\|>'"
    ):
        Tokenizer.load(file)
    assert Tokenizer.load(file, "</s>").end == ("</s>", 0, "data.end_of_text")
    with pytest.raises(DataError, match="end_of_text=<eos>: the tokenizer has no such token"):
        Tokenizer.load(file, "<eos>")
    with pytest.raises(DataError, match="end_of_text=a: a character of ordinary text"):
        Tokenizer.load(file, "a")
    # an added token is no ordinary one, even if it is not special
    record = json.loads(file.read_text())
    record["added_tokens"].append(record["added_tokens"][0] | {"id": 0, "content": "</s>", "special": False})
    file.write_text(json.dumps(record))
    assert Tokenizer.load(file).end == ("</s>", 0, "its usual name")


def test_each_document_ends_with_the_wanted_token_and_has_no_other(local, tmp_path, capsys):
    file = str(write(tmp_path / "words"))
    text = tmp_path / "documents.jsonl"
    text.write_text("".join(json.dumps({"text": word}) + "\n" for word in ["one", "</s>", "<|im_end|>", "one"] * 9))
    settings = {"source": str(text), "tokenizer": file, "max_unknown": 1.0, "validation_fraction": 0.3}
    folders = {}
    for end, wanted in ((4, None), (0, "</s>"), (5, "<|stop|>")):
        data = local(**settings, end_of_text=wanted)
        folders[end] = prepare(data)["local"]
        assert f"(id {end}), by " in capsys.readouterr().err
        corpus = open_corpus(data)
        assert corpus.tokenizer.end_of_text == end
        for name, tokens in {"train": corpus.train["local"], "held out": corpus.validation["local"]}.items():
            ids = tokens.read(0, len(tokens)).tolist()
            # each document is one word, or an unknown one
            assert ids[1::2] == [end] * (len(ids) // 2), name
            assert {*ids[::2]} <= {0, 2, 3} - {end}
    assert len({*folders.values()}) == 3
    # the file that names the last one is lost
    (folders[5] / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"the tokens were made with the end of text '<\|stop\|>'"):
        open_corpus(data)
    # the token that is taken in any case changes no folder
    assert token_folders(local(**settings, end_of_text="<|im_end|>")) == {"local": folders[4]}
    # our own tokenizers have their own
    with pytest.raises(DataError, match=r"tokenizer=bytes ends documents with <\|endoftext\|>"):
        prepare(local(tokenizer="bytes", end_of_text="</s>"))
    mixed = {"a": Source(path=str(folders[4]), weight=1), "b": Source(path=str(folders[0]), weight=1)}
    with pytest.raises(DataError, match="another tokenizer or end of text"):
        open_corpus(Data(name="mix", sources=mixed))
