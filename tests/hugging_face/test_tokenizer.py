import json
from pathlib import Path

from tokenizers import Tokenizer as Encoder

from depthlm.data import Tokenizer, bytes_tokenizer
from depthlm.hugging_face.folder import write_tokenizer
from depthlm.hugging_face.tokenizer import as_tokenizer


def test_an_export_has_the_chosen_end_of_text_and_no_dropout(tmp_path: Path) -> None:
    encoder = Encoder.from_str(bytes_tokenizer().text)
    encoder.add_tokens(["<stop>"])
    record = json.loads(encoder.to_str())
    record["model"]["dropout"] = 0.5
    ours = Tokenizer(json.dumps(record), end_of_text="<stop>")
    assert ours.end_of_text == 258
    theirs = as_tokenizer(ours)
    assert theirs.eos_token_id == 258
    write_tokenizer(theirs, tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.end_of_text, loaded.dropout) == (258, None)
    assert theirs("a<stop>").input_ids == list(b"a<stop>") == loaded.encode_batch(["a<stop>"])[0]
