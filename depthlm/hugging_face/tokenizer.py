"""The tokenizer of a run with the interface of transformers."""

from pathlib import Path

from tokenizers import Tokenizer as Encoder
from transformers import PreTrainedTokenizerFast

from depthlm.data import Tokenizer
from depthlm.data.tokenizers import PADDING


def as_tokenizer(
    tokenizer: Tokenizer | PreTrainedTokenizerFast | str | Path, max_length: int | None = None
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a run directory or file for transformers, with the same ids as in training.

    Text that is spelled like a special token is encoded as text, and no token is added at the beginning or the end.
    Rows are padded on the left, for generation, with the padding token or, if there is none, with the end of text.

    tokenizer: a tokenizer of transformers is returned as it is. max_length: sequence length of training; transformers
    warns about longer texts. Raises DataError for a file that is no tokenizer or has no end of text.
    """
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.load(tokenizer)
    encoder = Encoder.from_str(tokenizer.text)
    if encoder.num_special_tokens_to_add(is_pair=False):
        encoder.post_processor = None
    end = encoder.id_to_token(tokenizer.end_of_text)
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
