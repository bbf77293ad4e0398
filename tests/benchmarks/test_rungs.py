"""The rungs of benchmarks/gpu.py that need a GPU, as far as they can be tried without one."""

import json
from typing import Any

from benchmarks.rungs import step
from depthlm.locations import REPOSITORY

MACHINE = {"device": "NVIDIA H200", "threads": 16, "versions": {"torch": "2.11.0"}}


def line_of(preset: str, mode: str, time: float, **more: Any) -> dict[str, Any]:
    shape = {"size": "1.5b", "micro_batch_size": 4, "sequence_length": 2048, "precision": "bf16"}
    return {"preset": preset, "mode": mode, **shape, "microseconds_per_token": time, "peak_memory_gib": 31.0, **more}


def test_the_table_of_mechanisms_has_a_row_per_preset_and_the_noise_of_vanilla():
    kernels = {"launches": 4031, "gpu_seconds": 0.191, "depth_seconds": 0.0042, "first_step_seconds": 4.0}
    lines = [line_of("vanilla", "compiled", 20.0, **kernels), line_of("vanilla", "graphs", 19.0)]
    lines += [line_of("denseformer", "compiled", 30.0, **kernels), line_of("denseformer", "graphs", 28.5)]
    lines += [{**line_of("dca", "compiled", 0.0), "error": "OutOfMemoryError"}]
    del lines[-1]["microseconds_per_token"]
    lines += [line_of("dca", "graphs", 40.0, captured=0, reason="it waits")]
    lines += [line_of("vanilla", "compiled", 22.0), line_of("vanilla", "graphs", 19.0)]
    text = step.markdown({"machine": MACHINE, "compared": True, "lines": lines})
    assert (
        "vanilla again, without graphs: +10.0%; vanilla again, with graphs: +0.0%; dca without graphs: it waits" in text
    )
    assert "| vanilla | 21.0 | 1.000 | 31.0 | 19.0 | 1.000 | 31.0 | 4.0 | 4,031 | 191.0 | 4.2 |  |" in text
    assert "| denseformer | 30.0 | 1.429 | 31.0 | 28.5 | 1.500 | 31.0 | 4.0 | 4,031 | 191.0 | 4.2 | 1.51 |" in text
    assert "| dca | error |  | 31.0 | 40.0 | 2.105 |" in text


def test_the_committed_results_still_make_tables():
    from benchmarks import gpu

    folder = REPOSITORY / "benchmarks/results/gpu-nvidia-h200"
    read = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    text, errors = gpu.fill("<!-- gpu -->\n<!-- end -->\n", {folder.name: read})
    assert not errors
    assert all(f"`{name}`, " in text for name in read)
