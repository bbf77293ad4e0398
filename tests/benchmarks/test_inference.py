"""benchmarks/inference.py: prefill in chunks, and a paper's numbers relative to its own baseline."""

import torch

from benchmarks import inference
from benchmarks.shared import reporting
from depthlm.config import compose_anywhere


def test_chunks_fill_the_same_cache():
    task = inference.Task(["size=micro"], batch=2, prompt=11, new=2)
    model, tokens_bt = inference.build("moda", task)
    whole, parts = (inference.filled_cache(model, tokens_bt, task._replace(chunk=chunk)) for chunk in (None, 4))
    assert parts.length == whole.length == 11
    for slot in range(model.size.num_layers):
        for one, other in zip(parts._slots[slot], whole._slots[slot], strict=True):
            torch.testing.assert_close(one, other)


def test_the_table_of_dca_compares_with_the_model_that_reads_all_outputs():
    paper = reporting.read_table(inference.TABLES, "dca_24")
    # the paper: k = 2 has "48% lower inference latency compared to k = 24"
    lines = {}
    for name, seconds in paper["seconds"].items():
        model, last_k = name.split(" ")
        config = compose_anywhere([*paper["overrides"], f"model={model}", last_k])
        assert config.size.num_layers == 24
        phase = {"microseconds_per_token": 1.0, "overhead": 0.0, "microseconds_added": 0.0}
        lines[name] = {"prefill": phase, "decode": phase, "peak_memory_gib": None, "cache_bytes": 1,
                       "together": 4.0 * seconds, "paper_seconds": seconds}  # fmt: skip
    results = {"presets": lines, "again": [1.0], "baseline": paper["baseline"],
               "machine": {"device": "none", "threads": 1, "versions": {"torch": "0"}}}  # fmt: skip
    *_, all_outputs, two = inference.markdown(results).splitlines()
    assert all_outputs.endswith("| +0.00% | +0.00% |")
    assert two.endswith("| -48.00% | -48.00% |")
