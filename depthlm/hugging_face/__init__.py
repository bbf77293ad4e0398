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


def export(
    run: str | Path,
    to: str | Path | None = None,
    trust: Sequence[str] = (),
    *,
    license: str | None = None,
    push_to: str | None = None,
    private: bool | None = None,
) -> "Export":
    """Export the newest valid checkpoint of a run as a folder with a model card that AutoModelForCausalLM loads.

    A vanilla model on a backbone of transformers becomes a folder of that model. Any other export includes its code,
    and loading it needs `trust_remote_code=True`. The folder appears in one step, and replaces an earlier export.

    to: the folder; None: `export` in the run directory. trust: modules whose mechanisms may be built and copied, as in
    `depthlm.load`. license: of the weights, as the hub names it, for the card. push_to: the repository of the hub, as
    owner/name, to which the folder is pushed. private: whether a new repository is private; None: the default of its
    owner. Raises UserError for a run without a checkpoint, a folder that contains other files or cannot be written, a
    mechanism that cannot be copied, and what the hub refuses; what was exported before it remains.
    """
    _check_transformers()
    from depthlm.hugging_face.card import check_license
    from depthlm.hugging_face.command import check_push, push
    from depthlm.hugging_face.folder import export as write

    check_license(license)
    if push_to is not None:
        check_push(push_to)
    elif private is not None:
        raise UserError("private=: has an effect only with push_to=; give push_to=, or leave it out")
    written = write(run, to, trust, license=license, repository=push_to)
    if push_to is not None:
        written = written._replace(page=push(written.folder, push_to, private))
    return written


def as_causal_lm(model: "Decoder", config: "Config") -> "PreTrainedModel":
    """Wrap a decoder, as returned by `depthlm.load`, for code that expects a transformers model. Shares the weights."""
    _check_transformers()
    from depthlm.hugging_face.causal_lm import CausalLM
    from depthlm.hugging_face.folder import causal_lm_config

    return CausalLM(causal_lm_config(model, config), model).eval()


def as_tokenizer(
    tokenizer: "Tokenizer | PreTrainedTokenizerFast | str | Path", max_length: int | None = None
) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a run directory or file for transformers; see `folder.as_tokenizer`."""
    _check_transformers()
    from depthlm.hugging_face.folder import as_tokenizer as wrap

    return wrap(tokenizer, max_length)


def _check_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise UserError(f"transformers is not installed; {install_command('evaluation')}") from None


__all__ = ["as_causal_lm", "as_tokenizer", "export"]
