"""The backbones equal models of transformers with the same weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthlm.pretrained.folder import (
    NATIVE,
    export_name,
    load_weights,
    native_config,
    native_type,
    read_pretrained,
)

from . import mixtures

# num_kv_heads, and what else differs from the backbone's file
CASES = [(kv_heads, {"tie_embeddings": kv_heads == 2}) for kv_heads in (1, 2, 4)]
KIMI = [
    (4, {}),
    (4, {"dense_layers": 2, "shared_experts": 2, "router_groups": 2}),
    (4, {"mixers": ["latent", "delta"], "router_scale": 1.0, "router_normalize": False}),
]


def cases():
    """Every backbone of transformers. Kimi Linear has three steps of its own in plain PyTorch, so it is slower."""
    for backbone in (*NATIVE, *mixtures.ARCHITECTURES):
        for number, (kv_heads, changes) in enumerate(KIMI if backbone == "kimi_linear" else CASES):
            marks = pytest.mark.slow if backbone == "kimi_linear" and number else ()
            yield pytest.param(backbone, kv_heads, changes, marks=marks, id=f"{backbone}-{kv_heads}-{number}")


def pair(make_decoder, folder, backbone, kv_heads, changes):
    # imported here, since it takes seconds
    import transformers

    ours = make_decoder(
        backbone, backbone_changes=changes, num_heads=4, num_kv_heads=kv_heads, num_layers=3, head_size=16,
        num_experts=6, experts_per_token=3, expert_size=24, shared_key_size=8, latent_size=24,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for name, parameter in ours.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    for buffer in ours.buffers():
        buffer.uniform_(-0.2, 0.2, generator=generator)
    weights = ours.state_dict()
    if backbone in mixtures.ARCHITECTURES:
        assert native_type(ours) is None
        named, architecture = mixtures.export(backbone, weights), mixtures.ARCHITECTURES[backbone]
        settings = mixtures.settings(backbone, ours.size, ours.backbone)
    else:
        assert native_type(ours) == backbone
        named = {export_name(backbone, name): weight for name, weight in weights.items()}
        settings, architecture = native_config(backbone, ours.size, ours.backbone, 128), NATIVE[backbone].architecture
    named = {name: weight.detach().contiguous() for name, weight in named.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings | {"eos_token_id": None, "pad_token_id": None}))
    cls = getattr(transformers, architecture)
    theirs, report = cls.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(report.values())
    return ours, theirs


def under_our_names(theirs, folder):
    """The weights of a model of transformers, through a folder that it writes."""
    theirs.save_pretrained(folder)
    if theirs.config.model_type in mixtures.ARCHITECTURES:
        return mixtures.read(theirs.config.model_type, load_file(folder / "model.safetensors"))
    return load_weights(read_pretrained(folder))


@pytest.mark.parametrize(("backbone", "kv_heads", "changes"), cases())
def test_logits_gradients_and_three_training_steps_equal_transformers(
    make_decoder, tmp_path, backbone, kv_heads, changes
):
    ours, theirs = pair(make_decoder, tmp_path, backbone, kv_heads, changes)
    generator = torch.Generator().manual_seed(1)
    for length in (1, 7, 40, 70):
        tokens = torch.randint(0, 512, (2, length), generator=generator)
        with torch.no_grad():
            assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4

    # a larger epsilon, since the step of a gradient near zero is dominated by rounding
    steps = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5) for model in (ours, theirs)]
    for number in range(3):
        tokens = torch.randint(0, 512, (2, 24), generator=generator)
        sums = ours(tokens[:, :-1], tokens[:, 1:])
        loss = sums.nll / sums.tokens
        expected = theirs(tokens, labels=tokens).loss
        assert abs(loss - expected) < 1e-4
        loss.backward()
        expected.backward()
        if number == 0:
            before = [parameter.data for parameter in theirs.parameters()]
            for parameter in theirs.parameters():
                parameter.data = parameter.grad.clone()
            gradients = under_our_names(theirs, tmp_path / "gradients")
            for parameter, data in zip(theirs.parameters(), before, strict=True):
                parameter.data = data
            for name, parameter in ours.named_parameters():
                difference = (parameter.grad - gradients[name]).norm()
                assert difference < 2e-4 * gradients[name].norm() + 1e-6, name
        for step in steps:
            step.step()
            step.zero_grad()
    trained = under_our_names(theirs, tmp_path / "trained")
    for name, parameter in ours.named_parameters():
        difference = (parameter.detach() - trained[name]).abs()
        assert difference.mean() < 1e-5, name
        assert difference.max() < 1e-4 * (1 + parameter.abs().max()), name
