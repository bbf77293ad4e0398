"""The backbones equal models of transformers with the same weights."""

import pytest
import torch

from depthlm.pretrained.experts import stack_experts
from depthlm.pretrained.native import NATIVE, our_name


def pair(make_decoder, backbone, tie, kv_heads):
    # imported here, since it takes seconds
    import transformers

    ours = make_decoder(
        backbone, tie=tie, num_heads=4, num_kv_heads=kv_heads, num_layers=3, head_size=16, num_experts=6,
        experts_per_token=3, expert_size=24,
    )  # fmt: skip
    native, prefix = NATIVE[backbone], "".join(part.capitalize() for part in backbone.split("_"))
    config, cls = (getattr(transformers, f"{prefix}{kind}") for kind in ("Config", "ForCausalLM"))
    theirs = cls(
        config(
            **{theirs: getattr(ours.size, name) for name, theirs in native.shape().items()},
            **{theirs: getattr(ours.backbone, name) for name, theirs in native.keys().items()},
            rope_parameters={"rope_type": "default", "rope_theta": ours.backbone.rope_theta},
            attn_implementation="eager",
        )
    )
    parameters = theirs.named_parameters()
    named = stack_experts({our_name(backbone, name): parameter.detach() for name, parameter in parameters})
    generator = torch.Generator().manual_seed(0)
    for name, parameter in ours.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    ours_named = dict(ours.named_parameters())
    assert named.keys() == ours_named.keys()
    for name, parameter in named.items():
        parameter.copy_(ours_named[name].data)
    return ours, theirs, named


@pytest.mark.parametrize("backbone", NATIVE)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_and_three_training_steps_equal_transformers(make_decoder, backbone, tie, kv_heads):
    ours, theirs, named = pair(make_decoder, backbone, tie, kv_heads)
    generator = torch.Generator().manual_seed(1)
    for length in (1, 7, 40):
        tokens = torch.randint(0, 512, (2, length), generator=generator)
        with torch.no_grad():
            assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4

    # a larger epsilon, since the step of a gradient near zero is dominated by rounding
    steps = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5) for model in (ours, theirs)]
    for _ in range(3):
        tokens = torch.randint(0, 512, (2, 24), generator=generator)
        sums = ours(tokens[:, :-1], tokens[:, 1:])
        loss = sums.nll / sums.tokens
        expected = theirs(tokens, labels=tokens).loss
        assert abs(loss - expected) < 1e-4
        loss.backward()
        expected.backward()
        for step in steps:
            step.step()
            step.zero_grad()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, named[name], atol=1e-4, rtol=1e-4, msg=name)
