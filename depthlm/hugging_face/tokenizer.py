"""The tokenizer of a run with the interface of transformers."""

import json
from pathlib import Path

from tokenizers import Tokenizer as Encoder
from transformers import PreTrainedTokenizerFast

from depthlm.data import Tokenizer
from depthlm.data.tokenizers import PADDING


def as_tokenizer(
    tokenizer: Tokenizer | PreTrainedTokenizerFast | str | Path, max_length: int | None = None
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a run directory or file for transformers, with the same ids as in training.

    Text that is spelled like a special token is encoded as text, no token is added at the beginning or the end, and
    BPE dropout is off.
    Rows are padded on the left, for generation, with the padding token or, if there is none, with the end of text.

    tokenizer: a tokenizer of transformers is returned as it is. max_length: sequence length of training; transformers
    warns about longer texts. Raises DataError for a file that is no tokenizer or has no end of text.
    """
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.load(tokenizer)
    record = json.loads(tokenizer.text)
    for token in record.get("added_tokens") or []:
        # transformers would leave it as it is, and encode text as it
        token["special"] = token["special"] or token["content"] == tokenizer.end.token
    encoder = Encoder.from_str(json.dumps(record))
    if tokenizer.dropout:
        encoder.model.dropout = None
    if encoder.num_special_tokens_to_add(is_pair=False):
        encoder.post_processor = None
    end = tokenizer.end.token
    lengths = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=encoder,
        eos_token=end,
        pad_token=end if encoder.token_to_id(PADDING) is None else PADDING,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **lengths,
    )
