import pytest
import torch

from depthlm.analysis.memory import activation_memory, memory_per_gpu


@pytest.mark.parametrize(
    ("precision", "stage", "expected"),
    [
        ("fp32", 0, (4, 4, 8)),
        ("fp32", 1, (4, 4, 1)),
        ("bf16", 0, (4, 4, 8)),
        ("bf16", 1, (2, 6, 1.5)),
        ("bf16", 2, (2, 0.25, 1.5)),
        ("fp16", 3, (0.25, 0.25, 1.5)),
    ],
)
def test_bytes_per_parameter_on_eight_gpus(precision, stage, expected):
    memory = memory_per_gpu(1000, stage, 8, precision, activations=5.0)
    assert (memory.weights, memory.gradients, memory.optimizer) == tuple(1000 * b for b in expected)
    assert memory.total == 1000 * sum(expected) + 5


def test_unknown_settings_are_refused():
    for stage, ranks, precision in ((4, 1, "fp32"), (0, 0, "fp32"), (0, 1, "int8")):
        with pytest.raises(ValueError, match="stage"):
            memory_per_gpu(1, stage, ranks, precision)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_near_those_that_autograd_saves(vanilla, checkpointing):
    model = vanilla("micro", "qwen3", "cpu", num_layers=8, hidden_size=128, intermediate_size=384)
    model.activation_checkpointing = checkpointing
    tokens = torch.zeros(4, 128, dtype=torch.long)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    estimate = activation_memory(model.size, model.size.num_layers, model.backbone, 4, 128, "fp32", checkpointing)
    if checkpointing:
        assert estimate < 0.5 * activation_memory(
            model.size, model.size.num_layers, model.backbone, 4, 128, "fp32", False
        )
    else:
        assert 0.7 < sum(saved.values()) / estimate < 1.3
