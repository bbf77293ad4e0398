"""The page of docs/results agrees with the committed records of its runs, and they with the experiments."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from depthlm.config import compose
from depthlm.config.saved import compare
from depthlm.machine import environment
from depthlm.sweeps import Point
from docs.results.analysis import archive, page, transfer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def records() -> page.Records:
    return page.read_records()


@pytest.mark.slow
def test_the_tables_of_the_pages_are_those_of_the_records(records):
    tables = page.blocks(records)
    for path in page.PAGES:
        text = path.read_text()
        assert page.with_blocks(text, tables) == text, "run `python docs/results/analysis/page.py`"


def test_the_tables_on_transfer_are_those_of_the_records(monkeypatch):
    lines = archive.lines_of("transfer")
    assert Path(archive.points_of("transfer")[-1].directory).name in lines
    numbers = "optimizer.lr", "size.num_layers", "size.hidden_size"

    def key(settings: dict[str, Any], *names: str) -> tuple[str, ...]:
        return tuple(str(settings.get(name, "standard")) for name in (*names, *numbers))

    known = {key(line["settings"], "model.name", "parametrization.name"): name for name, line in lines.items()}
    assert len(known) == len(lines)
    # a release composes the names of all of them, which takes longer than all else
    directory = property(lambda point: known[key(point.settings, "model", "parametrization")])
    monkeypatch.setattr(Point, "directory", directory)
    text = transfer.PAGE.read_text()
    assert page.with_blocks(text, transfer.blocks(archive.rows_of("transfer"))) == text, (
        "run `python docs/results/analysis/page.py`"
    )


BLOCK = re.compile(r"<!-- \w+ -->.*?<!-- end -->", re.DOTALL)


def test_the_numbers_of_the_findings_are_those_of_the_tables():
    pages = {path: path.read_text() for path in (*page.PAGES, transfer.PAGE)}
    tables = " ".join(block for text in pages.values() for block in BLOCK.findall(text))
    known = {abs(float(number.replace(",", ""))) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", tables)}
    texts = {path: BLOCK.sub("", text) for path, text in pages.items()}
    readme = (ROOT / "README.md").read_text().partition("One [result](docs/results")[2].partition("## ")[0]
    findings = [re.sub(r"arXiv\s+[\d.]+", "", text) for text in (texts[page.RESULTS / "README.md"], readme)]
    said = [found for text in findings for found in re.findall(r"(\d+\.\d+)(M?)", text)]
    # other numbers of the tables' page are those of papers, or of settings
    said += [(number, "") for number in re.findall(r"[-+](\d\.\d+)", texts[page.RESULTS / "tables.md"])]
    assert len(said) > 80
    for number, million in said:
        digits = len(number.partition(".")[2])
        exact = (value / 1e6 if million else value for value in known)
        assert any(f"{value:.{digits}f}" == number for value in exact), number


@pytest.mark.slow
def test_the_pictures_of_the_pages_are_drawn(records, tmp_path):
    page.draw_all(records, tmp_path)
    shown = set(re.findall(r"\]\((\w+\.png)\)", " ".join(path.read_text() for path in page.PAGES)))
    assert {"depth.png", "slopes.png", "scaling.png"} < shown
    assert {path.name for path in tmp_path.iterdir()} >= shown - {"transfer.png"}


def nested(settings: dict[str, object]) -> object:
    """Return settings whose keys have dots as sections."""
    config = OmegaConf.create({})
    for key, value in settings.items():
        OmegaConf.update(config, key, value, force_add=True)
    return OmegaConf.to_container(config)


def assert_trained_as_said(point: Point, line: dict[str, Any] | None) -> bool:
    """Compare the settings of a run with its point; return whether the run is complete."""
    if line is None or "failure" in line:
        return False
    # newer settings have the values that the run had without them
    composed = archive.decisive_settings(compose(point.overrides, here=False))
    assert compare(nested(line["settings"]), nested(composed)) == {}
    return True


@pytest.mark.release
def test_every_recorded_run_trained_as_its_experiment_says():
    compared = 0
    for experiment in archive.EXPERIMENTS:
        lines = archive.lines_of(experiment)
        points = {Path(point.directory).name: point for point in archive.points_of(experiment)}
        compared += sum(assert_trained_as_said(point, lines.get(name)) for name, point in points.items())
        assert lines.keys() <= points.keys()
    assert compared


@pytest.mark.release
def test_the_points_of_the_page_repeat_to_the_last_digit(tmp_path, records):
    here = archive.place(environment.describe("cpu"))
    # processors of one name may have other vector instructions, with which the last digits differ
    vectors = (torch.backends.cpu.get_cpu_capability(), torch.cpu._is_amx_tile_supported())
    same = vectors == ("AVX512", here["device"].startswith("Intel"))
    points = [(p, line) for p, line in page.repeated(records) if same and here.items() <= line["environment"].items()]
    if not points:
        pytest.skip("this machine or its packages differ from those of the recorded runs")
    for point, line in points:
        overrides = [*point.overrides, f"output_dir={tmp_path / 'run'}"]
        subprocess.run([sys.executable, ROOT / "train.py", *overrides], cwd=ROOT, check=True)
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert all(summary[name] == line["summary"][name] for name in ("validation_loss", "training_loss"))
