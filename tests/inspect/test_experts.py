"""The picture of experts over training reads every valid row of experts.jsonl, and no damaged one."""

import json

import numpy as np

from depthlm.inspect.command import expert_picture


def row(step: int, layers: int = 2, experts: int = 4, **changes: object) -> dict[str, object]:
    load = np.full((layers, experts), 1 / experts)
    load[:, 0] += 0.1 * step / experts
    values = {"step": step, "load": load.tolist(), "entropy": [1.3] * layers, "bias": (0.01 * load).tolist()}
    return values | changes


def test_damaged_rows_are_left_out_and_without_rows_there_is_no_picture(tmp_path):
    (tmp_path / "experts.jsonl").write_text("")
    assert expert_picture(tmp_path) is None
    damaged: list[object] = [
        row(2, load=[[0.5, 0.5], [1.0]]), row(2, experts=3), row(2, entropy=[1.0]), row(2, bias=None),
        row(2, load="none"), {"step": 2}, [2], row(2) | {"step": "two"}, row(2, entropy=["a", "b"]),
    ]  # fmt: skip
    lines = [json.dumps(each) for each in (row(1), *damaged, row(3))]
    (tmp_path / "experts.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"step": 4, "lo\xff')
    picture = expert_picture(tmp_path)
    assert picture is not None
    shapes = {name.removeprefix("experts_"): array.shape for name, array in picture.arrays.items()}
    assert shapes == {"step": (2,), "load": (2, 2, 4), "entropy": (2, 2), "bias": (2, 2, 4)}
    assert picture.arrays["experts_step"].tolist() == [1, 3]
    load, _, entropy, bias, _ = picture.draw().axes
    assert load.get_title() == "load at step 3, 1 if all are equal"
    assert entropy.get_title() == "entropy of the router in nats, at most 1.39"
    assert [line.get_xdata().tolist() for line in bias.lines] == [[1, 3], [1, 3]]
