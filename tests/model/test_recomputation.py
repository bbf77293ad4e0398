"""Which operators the backward pass computes again, with each choice of activation checkpointing."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from depthlm.model.decoder import stored_operators


class Counts(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def backward_calls(make_decoder: Any, how: bool | int | str) -> Counter[Any]:
    model = make_decoder("qwen3", num_layers=4)
    model.checkpoint_activations(how)
    tokens = torch.arange(16)[None] % model.size.vocab_size
    loss = model(tokens, tokens).nll
    with Counts() as counts:
        loss.backward()
    return counts.calls


@pytest.mark.parametrize(("how", "layers"), [(False, 0), (True, 4), (1, 4), (2, 2), (3, 2), (4, 1), ("selective", 4)])
def test_the_chosen_layers_are_computed_again(make_decoder, how, layers):
    # each layer has one SiLU
    assert backward_calls(make_decoder, how)[torch.ops.aten.silu.default] == layers


def test_selective_recomputation_repeats_no_matrix_product_and_no_attention(make_decoder):
    plain, selective, every = (backward_calls(make_decoder, how) for how in (False, "selective", True))
    # on a GPU, that of documents
    assert torch.ops.aten._flash_attention_forward.default in stored_operators()
    for operator in stored_operators():
        assert selective[operator] == plain[operator]
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert every[attention] == 4
    assert every[torch.ops.aten.mm.default] > plain[torch.ops.aten.mm.default]
