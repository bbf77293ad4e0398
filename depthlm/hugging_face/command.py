"""`python -m depthlm export`: a run as a folder of Hugging Face, and how to load it."""

from dataclasses import dataclass
from typing import Optional

from depthlm.fields import key
from depthlm.hugging_face import export


@dataclass
class ExportArguments:
    """What `export` takes."""

    run: str = key(doc="run directory; its newest whole checkpoint is exported")
    to: str = key(doc="the folder to write; an earlier export there is replaced")
    trust: Optional[list[str]] = key(None, "modules that the run's own mechanism comes from; they are copied along")


def export_run(arguments: ExportArguments) -> None:
    """Export, and print what was written and how it is loaded. Raises UserError."""
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
