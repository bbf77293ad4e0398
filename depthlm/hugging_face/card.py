"""The model card of an export: README.md, whose numbers are those that the run itself recorded."""

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from depthlm.accounting.cost import count_parameters
from depthlm.config import Config
from depthlm.config.hydra_context import comment
from depthlm.config.protocol import protocol_texts
from depthlm.config.validate.explain import option_file
from depthlm.counts import count_text
from depthlm.errors import UserError
from depthlm.files import read_json
from depthlm.model import Decoder
from depthlm.model.attention import attention_class
from depthlm.run_directory import RunDirectory
from depthlm.runs.loss_curve import plot_loss
from depthlm.runs.manifest import Manifest
from depthlm.runs.records import ValidationLosses, finite, perplexity, read_run, training_loss
from depthlm.streams import printable

CARD, CURVE = "README.md", "loss.png"
TEXT = """# {title}

A decoder language model, {start} on {corpus}. It is a base model: it continues text, and is not trained to follow
instructions.

## Mechanism

How a layer uses the results of earlier layers:

{mechanism}

## Training

{training}
{losses}
## Load

`AutoModelForCausalLM` and `AutoTokenizer` of transformers 5 load this folder{remote}. depthlm is not needed.

## License

{licenses}
"""


class Results(NamedTuple):
    """The losses of the weights of a checkpoint, in nats per token.

    step, tokens: of the checkpoint. is_complete: whether the run ended with it. measured: the row of metrics.jsonl
    with the validation of this step, or the newest before it. training: the mean over the last logging interval.
    """

    step: int
    tokens: int
    is_complete: bool
    measured: dict[str, Any]
    training: float | None


def check_license(license: str | None) -> None:
    """Raise UserError for a text that cannot be an identifier of the hub; which ones exist, only the hub knows."""
    if license is not None and not re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", license):
        close = re.sub(r"[^a-z0-9.]+", "-", license.lower()).strip("-.")
        hint = f"; did you mean `{close}`?" if close else ""
        raise UserError(
            f"license={license}: must be an identifier of the hub, in lower case, such as apache-2.0, mit, cc-by-4.0 "
            f"or other (https://huggingface.co/docs/hub/repositories-licenses){hint}"
        )


def write_card(
    folder: Path, run: Path, model: Decoder, config: Config, manifest: Manifest, *, native: bool, license: str | None
) -> None:
    """Write README.md, and loss.png if the run logged losses, into the folder of an export.

    manifest: of the exported checkpoint. native: whether the model is part of transformers. license: of the weights, as
    the hub names it; None: not stated. Raises OSError.
    """
    record, environment = read_run(run), read_json(RunDirectory(run).environment)
    step = manifest.step
    logged = [row for row in record.rows if row["step"] <= step]
    measured: dict[str, Any] = next((row for row in reversed(logged) if ValidationLosses.of_row(row)), {})
    is_complete = record.summary.get("steps") == step
    results = Results(step, manifest.tokens, is_complete, measured, training_loss(logged[-1]) if logged else None)
    if any(training_loss(row) is not None and finite(row.get("tokens")) is not None for row in record.rows):
        plot_loss(run, finite(record.summary.get("unigram_entropy")), folder / CURVE)
    licenses = [f"- Weights: {license or 'not stated'}."]
    licenses += [] if native else ["- The files `depthlm_*.py`, copied from depthlm: Apache-2.0."]
    licenses += [f"- Training data, {config.data.name}: {config.data.license}."] if config.data.license else []
    text = TEXT.format(
        title=f"{config.model.name} {config.size.name}",
        start="started from other weights and trained"
        if config.init_from or config.fork_from
        else "trained from scratch",
        corpus=corpus(config, environment),
        mechanism=mechanism(model, config),
        training=table(["", ""], (sizes(model, config) | protocol(config, results, environment)).items()),
        losses=losses(config, results, has_curve=(folder / CURVE).exists()),
        remote="" if native else " with `trust_remote_code=True`, which runs the Python files beside this card",
        licenses="\n".join(licenses),
    )
    text = f"---\n{metadata(config, results, license).to_yaml()}\n---\n\n{text}"
    (folder / CARD).write_text(printable(text), encoding="utf-8")


def version_of(environment: Mapping[str, Any]) -> str:
    """Return the version of depthlm that trained a run, and its commit; empty where they are not recorded."""
    records = (environment.get(name) for name in ("versions", "git"))
    versions, git = (record if isinstance(record, dict) else {} for record in records)
    if not versions.get("depthlm"):
        return ""
    changed = " with uncommitted changes" if git.get("changed") else ""
    commit = f" (commit {str(git['commit'])[:12]}{changed})" if git.get("commit") else ""
    return f"depthlm {versions['depthlm']}{commit}"


def metadata(config: Config, results: Results, license: str | None) -> ModelCardData:
    """Return the metadata of the card, which the hub indexes; losses only of a complete run."""
    hubs = list(dict.fromkeys(source.hub for source in (config.data, *config.data.sources.values()) if source.hub))
    sources = config.data.validation | config.data.sources
    losses = ValidationLosses.of_row(results.measured).by_set if results.is_complete else {}
    of_sets = {name: sources.get(name, config.data) for name in losses}
    parts = [(source.hub, source.subset) for source in of_sets.values()]
    evaluations = [
        EvalResult(
            task_type="text-generation",
            dataset_type=source.hub or name,
            # the hub would merge the losses of two sets of the same part of a data set
            dataset_config=source.subset if parts.count((source.hub, source.subset)) == 1 else name,
            dataset_name=f"{name} (validation)",
            metric_type=metric,
            metric_name=f"validation {metric}",
            metric_value=value,
        )
        for (name, source), loss in zip(of_sets.items(), losses.values(), strict=True)
        for metric, value in (("loss", loss), ("perplexity", perplexity(loss)))
        if value is not None
    ]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license,
        datasets=hubs or None,
        tags=["depthlm", "pretraining", *re.split(r"[+,]", config.model.name)],
        model_name=f"{config.model.name} {config.size.name}",
        eval_results=evaluations or None,
    )


def mechanism(model: Decoder, config: Config) -> str:
    """Return a description of the connection and the attention, their papers, and their settings."""
    attention = attention_class(layer.attention for layer in model.layers)
    classes = {"connection": type(model.connections[0]), "attention": attention}
    lines = []
    for part, mechanism_class in classes.items():
        settings = {key: value for key, value in getattr(config.model, part).items() if not key.startswith("_")}
        package, _, module = mechanism_class.__module__.rpartition(".")
        # the option that selects a class of depthlm is named as its module
        option = module if package.startswith("depthlm.") else None
        if option is not None:
            about = " ".join(comment(option_file(f"model/{part}", option, None)))
        else:
            about = (inspect.getdoc(mechanism_class) or "a class of its own").partition("\n\n")[0]
        about = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", " ".join(about.split()))
        name = option or mechanism_class.__qualname__
        lines.append(f"- **{part.capitalize()}** `{name}`: {about.removesuffix('.')}.")
        if settings:
            values = ", ".join(f"`{key}={json.dumps(value)}`" for key, value in settings.items())
            lines[-1] += f"\n  Settings: {values}."
    if model.loops > 1:
        lines.append(f"- **Loops**: {model.loops} passes through the same layers.")
    return "\n".join(lines)


def sizes(model: Decoder, config: Config) -> dict[str, str]:
    """Return the rows of the table about the sizes of the model."""
    size, counts = model.size, count_parameters(model)
    parts = [f"{part} {count:,}" for part, count in counts.items() if count and part not in ("total", "activated")]
    heads = f"{size.num_heads} heads of size {size.head_size} ({size.num_kv_heads} of keys and values)"
    rows = {
        "parameters": f"{counts['total']:,} ({', '.join(parts)})",
        "layers": f"{size.num_layers} of width {size.hidden_size:,}, {heads}, MLP of width {size.intermediate_size:,}",
        "vocabulary": f"{size.vocab_size:,}",
        "backbone": config.backbone.name,
    }
    if {*config.backbone.mixers} != {"attention"}:
        layers = Counter(config.backbone.mixers_of(size.num_layers))
        rows["mixers"] = ", ".join(f"{name} in {count} layers" for name, count in layers.items())
    if "activated" in counts:
        experts = f"{size.num_experts} of width {size.expert_size:,}, {size.experts_per_token} per token"
        rows |= {"experts": experts, "activated parameters": f"{counts['activated']:,} per token"}
    return rows


def protocol(config: Config, results: Results, environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the table about how the model was trained."""
    texts, start = protocol_texts(config), config.fork_from or config.init_from
    ranks = finite(environment.get("world_size")) or 1
    if not results.is_complete:
        texts["steps"] = f"{results.step:,} of {texts['steps']}: the run was not complete"
    names = ("steps", "batch", "optimizer", "peak learning rate", "parametrization", "schedule", "precision")
    rows = {
        "data": corpus(config, environment),
        "tokenizer": public(config.data.tokenizer),
        "started from": public(start) if start else "",
        "tokens": f"{results.tokens:,}",
        **{name: texts[name] for name in names if name in texts},
        "seed": f"{config.seed}",
        "trained with": version_of(environment),
        "device": str(environment.get("device") or "") + (f", {ranks:g} ranks" if ranks > 1 else ""),
    }
    return {name: text for name, text in rows.items() if text}


def losses(config: Config, results: Results, has_curve: bool) -> str:
    """Return the section on the losses, with the picture of their curve; empty where the run recorded no loss."""
    by_set, limit = ValidationLosses.of_row(results.measured).by_set, config.training.validation_tokens
    named = {f"validation, {name}": loss for name, loss in by_set.items()} | {"training": results.training}
    if not by_set and results.training is None:
        return ""
    rows = [
        [name, "–", "–"] if loss is None else [name, f"{loss:,.4f}", f"{perplexity(loss) or math.inf:,.4f}"]
        for name, loss in named.items()
        if loss is not None or name != "training"
    ]
    sets = "whole sets" if limit is None else f"at most {count_text(limit)} tokens of a set"
    notes = [f"Validation: {sets}, after step {results.measured['step']:,}."] if by_set else []
    notes += ["Training: mean over the last logging interval."] if results.training is not None else []
    picture = f"\n\n![Training and validation loss over tokens]({CURVE})" if has_curve else ""
    head = ["", "loss (nats per token)", "perplexity"]
    return f"\n## Losses\n\n{table(head, rows)}\n\n{' '.join(notes)}{picture}\n"


def corpus(config: Config, environment: Mapping[str, Any]) -> str:
    """Return the corpus, with its page on the hub if it has one."""
    data = config.data
    if data.hub:
        subset = f", subset {data.subset}" if data.subset else ""
        return f"{data.name} ([{data.hub}](https://huggingface.co/datasets/{data.hub}){subset})"
    if data.name == "stdlib":
        return f"the source code of the standard library of Python {environment.get('python') or ''}".rstrip()
    return "local text" if data.name == "local" else data.name


def public(place: str) -> str:
    """Return a name or relative path as it is, and only the last name of an absolute path, which may be private."""
    return Path(place).name if Path(place).is_absolute() else place


def table(head: list[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *([" ".join(cell.replace("|", r"\|").split()) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
