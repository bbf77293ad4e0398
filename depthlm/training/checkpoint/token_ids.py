"""The token ids of the weights that a run starts from."""

import logging
from pathlib import Path

from tokenizers import Tokenizer as Encoder

from depthlm.config import Config
from depthlm.data import Tokenizer
from depthlm.data.tokenizers import FILE_NAME
from depthlm.errors import UserError
from depthlm.run_directory import is_checkpoint

log = logging.getLogger("depthlm")


def check_token_ids(config: Config, tokenizer: Tokenizer) -> None:
    """Raise UserError if a token has another id, or none, in the tokenizer of `init_from` or `fork_from`.

    The source is a run directory, one of its checkpoints or a Hugging Face folder. Without a tokenizer.json there,
    nothing is compared, which is logged. tokenizer: of this run.
    """
    for key, source in (("init_from", config.init_from), ("fork_from", config.fork_from)):
        if source is not None:
            _check(f"{key}={source}", Path(source), tokenizer.vocabulary())


def _check(words: str, source: Path, ours: dict[str, int]) -> None:
    # a checkpoint is at <run directory>/checkpoints/<step>
    file = (source.absolute().parent.parent if is_checkpoint(source) else source) / FILE_NAME
    if not file.is_file():
        log.warning("%s: no %s there, so its token ids are not compared with the run's", words, FILE_NAME)
        return
    try:
        theirs = Encoder.from_file(str(file)).get_vocab()
    except Exception as error:  # the library raises no narrower type
        raise UserError(f"{words}: {FILE_NAME} is not a valid tokenizer ({error})") from None
    token = next((token for token, number in ours.items() if theirs.get(token) != number), None)
    if token is not None:
        raise UserError(
            f"{words}: its tokenizer differs from the run's: {token!r} has id {theirs.get(token, 'none')} in the "
            f"folder and {ours[token]} in the run; give data.tokenizer={file}"
        )
