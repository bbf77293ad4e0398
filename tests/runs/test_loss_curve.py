"""The plot of the loss curve of a run."""

import json
from pathlib import Path

from depthlm.runs.loss_curve import plot_loss


def test_the_loss_is_plotted_with_gaps_for_missing_values(tmp_path: Path, rendered: None) -> None:
    rows = [{"step": s, "tokens": s * 1000, "loss": None if s == 2 else 5.0 / s} for s in (1, 2, 3)]
    rows[-1]["validation/set/loss"] = 2.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = plot_loss(tmp_path, unigram_entropy=4.0).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
