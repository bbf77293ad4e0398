"""The command `python -m depthlm export`: export a run as a Hugging Face folder, push it, print how to load it."""

from dataclasses import asdict, dataclass

from depthlm.fields import key
from depthlm.hugging_face import export


@dataclass
class ExportArguments:
    """The arguments of `export`."""

    run: str = key(doc="run directory; its newest valid checkpoint is exported")
    to: str | None = key(None, "the folder to write; replaces an earlier export in it; by default <run>/export")
    push_to: str | None = key(
        None,
        "also push the folder to this model repository of the Hugging Face hub, <owner>/<name>; needs "
        "`hf auth login` or HF_TOKEN",
    )
    private: bool | None = key(
        None, "push_to: whether a new repository is private; by default as its owner has set on the hub"
    )
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
    name, remote = arguments.push_to or str(written.folder), "" if written.native else ", trust_remote_code=True"
    print(
        "\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({name!r}{remote})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({name!r}{remote})"
    )
    if written.page is not None:
        if arguments.license is None:
            print("\nThe model card states no license of the weights; license=<identifier> adds one.")
        print(f"\npushed: {written.page}")
