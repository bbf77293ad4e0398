"""The command `python -m depthlm export`: export a run as a Hugging Face folder, and print how to load it."""

import shlex
from dataclasses import asdict, dataclass

from depthlm.fields import key
from depthlm.hugging_face import export


@dataclass
class ExportArguments:
    """The arguments of `export`."""

    run: str = key(doc="run directory; its newest valid checkpoint is exported")
    to: str | None = key(None, "the folder to write; replaces an earlier export in it; by default <run>/export")
    license: str | None = key(
        None,
        "license of the weights for the model card, as the hub names it (apache-2.0, mit, cc-by-4.0, other); by "
        "default the card does not state one",
    )
    trust: list[str] | None = key(None, "modules that define the run's own mechanism; they are copied too")


def export_run(arguments: ExportArguments) -> None:
    """Export a run, and print the written files and the code that loads them. Raises UserError."""
    written = export(**asdict(arguments) | {"trust": arguments.trust or ()})
    print(f"{written.folder}: {written.model_type}, {written.parameters:,} parameters")
    for name, size in written.files.items():
        print(f"  {name:52} {size:>14,} bytes")
    name, remote = str(written.folder), "" if written.native else ", trust_remote_code=True"
    print(
        "\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({name!r}{remote})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({name!r}{remote})"
    )
    print(f"\n`hf upload <owner>/<name> {shlex.quote(name)}` pushes it to the hub")
