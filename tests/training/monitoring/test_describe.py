"""The table at the start of a run."""

import pytest

from depthlm.locations import CONF
from depthlm.training.monitoring.describe import protocol_remark

from ...options import configuration, option

MODA = "differs from MoDA (arXiv 2603.15619): size=moda_1.5b backbone=olmo2 data=olmo2_mix"
KIMI = "differs from Attention Residuals (arXiv 2603.15031): size=kimi_194m backbone=kimi_linear"
STDLIB = "data=stdlib is small for 101M parameters; data=fineweb_edu is larger"


@pytest.mark.parametrize(
    ("overrides", "parameters", "remark"),
    [
        (["size=moda_1.5b"], 1_500_000_000, MODA),
        (["size=moda_1.5b", "data=olmo2_mix"], 1_500_000_000, MODA),
        (["size=kimi_194m"], 101_000_000, f"{KIMI}; {STDLIB}"),
        (["size=tiny"], 101_000_000, STDLIB),
        (["size=tiny"], 3_000_000, ""),
    ],
)
def test_a_run_names_the_protocol_of_the_paper_of_its_size(overrides, parameters, remark):
    assert protocol_remark(configuration(*overrides), parameters) == remark


def test_the_groups_of_papers_exist():
    papers = [option("size", path.stem).get("paper", {}) for path in (CONF / "size").glob("*.yaml")]
    groups = {(group, name) for paper in papers for group, name in paper.items() if group != "source"}
    assert groups
    assert all((CONF / group / f"{name}.yaml").is_file() for group, name in groups)
