"""Hugging Face: export runs as folders that transformers loads, and start runs from such folders.

transformers comes with the extra `evaluation` and is imported only by the code that needs it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from depthlm.errors import UserError
from depthlm.locations import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from depthlm.config import Config
    from depthlm.data import Tokenizer
    from depthlm.hugging_face.folder import Export
    from depthlm.model import Decoder


def export(run: str | Path, to: str | Path, trust: Sequence[str] = ()) -> "Export":
    """Export the newest valid checkpoint of a run as a folder that AutoModelForCausalLM loads. See `folder.export`."""
    _check_transformers()
    from depthlm.hugging_face.folder import export as write

    return write(run, to, trust)


def as_causal_lm(model: "Decoder", config: "Config") -> "PreTrainedModel":
    """Wrap a decoder, as returned by `depthlm.load`, for code that expects a transformers model. Shares the weights."""
    _check_transformers()
    from depthlm.hugging_face.causal_lm import CausalLM
    from depthlm.hugging_face.folder import causal_lm_config

    return CausalLM(causal_lm_config(model, config), model).eval()


def as_tokenizer(
    tokenizer: "Tokenizer | PreTrainedTokenizerFast | str | Path", max_length: int | None = None
) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a run directory or file for transformers. See `tokenizer.as_tokenizer`."""
    _check_transformers()
    from depthlm.hugging_face.tokenizer import as_tokenizer as wrap

    return wrap(tokenizer, max_length)


def _check_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise UserError(f"transformers is not installed; {install_command('evaluation')}") from None


__all__ = ["as_causal_lm", "as_tokenizer", "export"]
