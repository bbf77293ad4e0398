"""Hugging Face: export runs as folders that transformers loads.

transformers comes with the extra `evaluation` and is imported only by the code that needs it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from depthlm.errors import UserError
from depthlm.locations import install_command

if TYPE_CHECKING:
    from depthlm.hugging_face.folder import Export


def export(
    run: str | Path, to: str | Path | None = None, trust: Sequence[str] = (), *, license: str | None = None
) -> "Export":
    """Export the newest valid checkpoint of a run as a folder that AutoModelForCausalLM loads, with a model card.

    A vanilla model on a backbone of transformers becomes a folder of that model. Any other export includes its code,
    and loading it needs `trust_remote_code=True`. The folder appears in one step, and replaces an earlier export.

    to: the folder; None: `export` in the run directory. trust: modules whose mechanisms may be built and copied, as in
    `depthlm.load`. license: of the weights, as the hub names it, for the card. Raises UserError for a run without a
    checkpoint, a folder that contains other files or cannot be written, and a mechanism that cannot be copied.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise UserError(f"transformers is not installed; {install_command('evaluation')}") from None
    from depthlm.hugging_face.folder import export as write

    return write(run, to, trust, license)


__all__ = ["export"]
