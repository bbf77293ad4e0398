"""What benchmarks time: peers that compute our logits."""

import pytest
import torch

import depthlm
from benchmarks import throughput
from depthlm.config import Config


@pytest.fixture
def config() -> Config:
    # the width of the heads together is not that of the stream, and queries share keys
    return depthlm.compose(
        ["size.hidden_size=48", "size.intermediate_size=80", "size.num_layers=2", "size.num_heads=4",
         "size.num_kv_heads=2", "size.head_size=16", "training.sequence_length=32", "training.batch_size=2",
         "tracker=none"]
    )  # fmt: skip


@pytest.mark.parametrize("peer", ["transformers", "litgpt"])
def test_a_peer_computes_our_logits(config, peer):
    pytest.importorskip(peer)
    ours = depthlm.build_model(config, "cpu")
    # norms start at 1, where exchanged ones would go unnoticed
    generator = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    tokens = throughput.random_tokens(config, 2)[:, :-1]
    if peer == "litgpt":
        theirs = throughput.litgpt_decoder(config, ours.state_dict())(tokens)
    else:
        theirs = throughput.transformers_decoder(ours)(input_ids=tokens).logits
    torch.testing.assert_close(theirs, ours(tokens), rtol=1e-5, atol=1e-5)
