"""The command `python -m depthlm export`: export a run as a Hugging Face folder, and print how to load it."""

from dataclasses import dataclass
from typing import Optional

from depthlm.fields import key
from depthlm.hugging_face import export


@dataclass
class ExportArguments:
    """The arguments of `export`."""

    run: str = key(doc="run directory; its newest valid checkpoint is exported")
    to: str = key(doc="the folder to write; replaces an earlier export in it")
    trust: Optional[list[str]] = key(None, "modules that define the run's own mechanism; they are copied too")


def export_run(arguments: ExportArguments) -> None:
    """Export a run, and print the written files and the code that loads them. Raises UserError."""
    written = export(arguments.run, arguments.to, arguments.trust or ())
    print(f"{written.folder}: {written.model_type}, {written.parameters:,} parameters")
    for name, size in written.files.items():
        print(f"  {name:52} {size:>14,} bytes")
    folder, remote = str(written.folder), "" if written.native else ", trust_remote_code=True"
    print(
        "\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({folder!r}{remote})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({folder!r}{remote})"
    )
