"""Whether activations change alike at every width and depth: the coordinate check of muP (arXiv 2203.03466, D.1).

    python docs/results/analysis/coordinate_check.py [--models vanilla ...] [--steps 10]

Trains each model for some steps on bytes of Python's standard library, at widths and depths that are multiples of the
base size's, in each parametrization. The figure is the root mean square of how much the values of a part have changed
on one batch: of the outputs of sublayers (their sum), the final hidden state after its norm, and the logits. In a
parametrization whose rates transfer, it is the same at every width or depth. Writes JSON, and a picture beside it.
"""

import sysconfig
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import depthlm
from benchmarks.shared.reporting import Results, arguments_of, headed, parser_of, publish, result_path, table
from depthlm.config import Config
from depthlm.model import Decoder
from depthlm.model.layer import Observer
from depthlm.model.shape import Parametrization, Size, SublayerSpec
from depthlm.ops.functions import rms_norm
from depthlm.optimizers.build import build_optimizer
from depthlm.runs.plots import HUES, MARKERS, grid, legend_below, log_ticks, save, subplots

# an eighth of the best rate, since ten steps at the best one change the final hidden state as far as its norm allows
BASE = ["size=nano_60k", "data=stdlib", "data.tokenizer=bytes", "precision=fp32", "tracker=none", "optimizer.lr=3e-3"]
BATCH, LENGTH = 8, 64
PARAMETRIZATIONS = ("standard", "mup", "completep")
PARTS = ("outputs", "hidden", "logits")
# multiples of the base size's
AXES = {"width": (1, 2, 4, 8), "depth": (1, 2, 4, 8)}


def scaled(size: Size, axis: str, factor: int) -> Size:
    """Return a size that is `factor` times as wide, with more heads, or as deep."""
    if axis == "depth":
        return replace(size, num_layers=factor * size.num_layers)
    names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
    return replace(size, **{name: factor * getattr(size, name) for name in names})


class Outputs(Observer):
    """Sums the outputs of the sublayers."""

    total: Tensor | float = 0.0

    def write(self, spec: SublayerSpec, output_btd: Tensor) -> None:
        """Add an output."""
        self.total = self.total + output_btd


@torch.no_grad()
def activations(model: Decoder, tokens_bt: Tensor) -> dict[str, Tensor]:
    """Return the tensors that the figure compares, by part."""
    observer = Outputs()
    hidden_btd = model.hidden(tokens_bt, observer=observer)
    assert isinstance(observer.total, Tensor)
    # without the weight of the final norm, which includes the factor of the logits
    normed_btd = rms_norm(hidden_btd, None, model.backbone.norm_eps)
    return {"outputs": observer.total, "hidden": normed_btd, "logits": model.logits(hidden_btd)}


def changes(config: Config, batches: list[Tensor]) -> dict[str, float]:
    """Train on all batches but the first, and return the change of each part on the first."""
    model = depthlm.build_model(config)
    optimizer = build_optimizer(model, config.optimizer)
    held, *others = batches
    before = activations(model, held[:, :-1])
    for batch in others:
        optimizer.zero_grad()
        (model(batch[:, :-1], batch[:, 1:]).nll / batch[:, 1:].numel()).backward()
        optimizer.step()
    after = activations(model, held[:, :-1])
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in PARTS}


def corpus(steps: int) -> list[Tensor]:
    """Return steps + 1 batches of bytes of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    count = (steps + 1) * BATCH * (LENGTH + 1)
    text = b"".join(file.read_bytes() for file in files[: count // 1000 + 1])[:count]
    return list(torch.tensor(list(text)).view(steps + 1, BATCH, LENGTH + 1))


def measure(models: list[str], steps: int) -> Results:
    """Return the changes by model, axis, parametrization and factor."""
    batches, results = corpus(steps), {}
    for name in models:
        config = depthlm.compose([*BASE, f"model={name}"])
        # at the base size, all parametrizations are the same
        at_base = changes(config, batches)
        results[name] = {axis: {} for axis in AXES}
        for axis, factors in AXES.items():
            for parametrization in PARAMETRIZATIONS:
                scaling = Parametrization(parametrization, None if parametrization == "standard" else config.size)
                results[name][axis][parametrization] = [
                    at_base
                    if factor == 1
                    else changes(
                        replace(config, size=scaled(config.size, axis, factor), parametrization=scaling), batches
                    )
                    for factor in factors
                ]
    return {"base": BASE, "steps": steps, "factors": AXES, "changes": results}


def markdown(results: Results) -> str:
    """Return by what factor each change grows from the base size to the largest one."""
    rows = []
    for model, by_axis in results["changes"].items():
        for axis, by_name in by_axis.items():
            factor = results["factors"][axis][-1]
            for name, points in by_name.items():
                first, last = points[0], points[-1]
                rows.append([model, f"{axis} x {factor}", name, *(f"{last[part] / first[part]:.2f}" for part in PARTS)])
    return headed(
        results,
        f"Growth of the changes after {results['steps']} steps:\n\n"
        + table(["model", "size", "parametrization", *PARTS], rows),
    )


def draw(results: Results, model: str, path: Path) -> None:
    """Draw the changes of a model over width and depth."""
    figure, axes = subplots(len(PARTS), 10.0, 5.6, rows=len(AXES), sharey="col")
    for row, (axis, by_name) in zip(axes, results["changes"][model].items(), strict=True):
        for place, part in zip(row, PARTS, strict=True):
            for number, (name, points) in enumerate(by_name.items()):
                place.plot(
                    results["factors"][axis], [point[part] for point in points],
                    color=HUES[number], marker=MARKERS[number], label=name,
                )  # fmt: skip
            place.set_xscale("log")
            place.set_xticks(results["factors"][axis], [f"{factor}" for factor in results["factors"][axis]])
            place.minorticks_off()
            place.set_yscale("log")
            place.set_xlabel(f"{axis}, as a multiple of the base size's")
            place.set_title(part, fontsize="medium")
            grid(place)
    for place in axes[0]:
        log_ticks(place.yaxis, place.get_ylim())
    for row in axes:
        row[0].set_ylabel("change (RMS)")
    legend_below(figure, axes.flat)
    save(figure, path, title=f"{model}: change of activations after {results['steps']} steps")


def main() -> None:
    """Measure, write the JSON and draw the first model."""
    parser = parser_of(__doc__, threads=1)
    parser.add_argument("--models", nargs="+", default=["vanilla"], help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="(default: %(default)s)")
    arguments = arguments_of(parser, markdown)
    results = measure(arguments.models, arguments.steps)
    path = arguments.output or result_path("coordinate-check")
    publish(path, results, markdown)
    draw(results, arguments.models[0], path.with_suffix(".png"))


if __name__ == "__main__":
    main()
