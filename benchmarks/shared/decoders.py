"""Decoders that benchmarks compare: ours in the engine of train.py, those of transformers and litgpt with our weights.

litgpt is not a dependency of this repository. Its own requirements exclude the versions of other packages that this
repository has, so it is installed without them.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, cat, nn

from depthlm.build import build_model
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.model import Decoder, compile_sublayers
from depthlm.pretrained.folder import export_name, native_config, native_type
from depthlm.training.engine import build_engine
from depthlm.training.graphs import MicroBatchGraphs, make_graphs
from depthlm.training.plan import Plan, make_plan
from depthlm.training.setup import compiles
from depthlm.training.step import train_step

INSTALL_LITGPT = "litgpt is not installed: pip install --no-deps litgpt lightning lightning-utilities torchmetrics"
Weights = dict[str, Tensor]


class Training(NamedTuple):
    """What train.py trains: the engine, the arithmetic of a batch, and a batch [accumulation, micro_batch, T + 1].

    graphs: see `make_graphs`. z_loss: its weight.
    """

    engine: Any
    plan: Plan
    batch: Tensor
    graphs: MicroBatchGraphs | None
    z_loss: float

    def step(self) -> float:
        """Train on the batch, and return the loss per token.

        Reading it waits for a GPU, which computes while the host continues.
        """
        # any seeds of dropout take as long, and a model without it does not use them
        seeds = self.batch[..., 0].int()
        nll = train_step(self.engine, self.batch, self.plan, self.z_loss, seeds=seeds, graphs=self.graphs)
        return nll / self.plan.tokens_per_step


def training_of(config: Config, device: torch.device) -> Training:
    """Build the decoder of a configuration in its engine, with a batch of random tokens."""
    plan, model = make_plan(config, ranks()), build_model(config, device)
    model.checkpoint_activations(config.training.activation_checkpointing)
    if compiles(config, device):
        compile_sublayers(model)
    batch, engine = random_tokens(config, plan.accumulation, plan.micro_batch_size), build_engine(config, plan, model)
    graphs = make_graphs(config, plan, engine)
    if graphs is not None:
        graphs.make_room(batch)
    return Training(engine, plan, batch.to(device), graphs, config.training.z_loss)


def random_tokens(config: Config, *batch: int) -> Tensor:
    """Return tokens of shape [*batch, T + 1]."""
    shape = (*batch, config.training.sequence_length + 1)
    return torch.randint(config.size.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def plain_step(model: nn.Module, loss: Callable[[], Tensor], learning_rate: float) -> Callable[[], float]:
    """Return a training step in a plain loop: fused AdamW, clipped gradients, and a loss that is read in every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=True)

    def step() -> float:
        before = loss()
        before.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return before.item()

    return step


def has_litgpt() -> bool:
    return importlib.util.find_spec("litgpt") is not None


def transformers_decoder(model: Decoder) -> nn.Module:
    """Return the same decoder as a transformers model, with its default attention, on the same device."""
    # reading this package takes seconds
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, weights = native_type(model), model.state_dict()
    assert kind is not None
    settings = native_config(kind, model.size, model.backbone, 2**15)
    # drawing weights that are replaced would take a CPU long
    with next(iter(weights.values())).device:
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    renamed = {export_name(kind, name): tensor for name, tensor in weights.items()}
    theirs.load_state_dict(renamed)
    return theirs.to(next(model.parameters()).dtype)


def litgpt_decoder(config: Config, weights: Weights) -> nn.Module:
    """Return litgpt's GPT of this shape, in its settings of Qwen3, with our weights."""
    if not has_litgpt():
        raise SystemExit(INSTALL_LITGPT)
    from litgpt.config import Config as LitgptConfig
    from litgpt.model import GPT

    size = config.size
    model = GPT(
        LitgptConfig(
            block_size=config.training.sequence_length,
            padded_vocab_size=size.vocab_size,
            n_embd=size.hidden_size,
            intermediate_size=size.intermediate_size,
            n_layer=size.num_layers,
            n_head=size.num_heads,
            n_query_groups=size.num_kv_heads,
            head_size=size.head_size,
            norm_class_name="RMSNorm",
            norm_eps=config.backbone.norm_eps,
            norm_qk=True,
            parallel_residual=False,
            rotary_percentage=1.0,
            rope_base=config.backbone.rope_theta,
            mlp_class_name="LLaMAMLP",
            bias=False,
        )
    )
    names = {
        ".attention.o_proj.": ".attn.proj.",
        ".attention.q_norm.": ".attn.norm_q.",
        ".attention.k_norm.": ".attn.norm_k.",
        ".attention.": ".attn.",
        ".attention_norm.": ".norm_1.",
        ".mlp_norm.": ".norm_2.",
        ".gate_proj.": ".fc_1.",
        ".up_proj.": ".fc_2.",
        ".down_proj.": ".proj.",
        "final_norm.": "transformer.ln_f.",
        "embedding.": "transformer.wte.",
        "head.": "lm_head.",
        "layers.": "transformer.h.",
    }
    renamed = {}
    for name, tensor in weights.items():
        for ours, theirs in names.items():
            # a part of a name, or its beginning
            if ours.startswith("."):
                name = name.replace(ours, theirs)
            elif name.startswith(ours):
                name = theirs + name.removeprefix(ours)
        renamed[name] = tensor
    for layer in range(size.num_layers):
        # one matrix: the rows of all query heads, then those of all keys, then those of all values
        attention = f"transformer.h.{layer}.attn."
        separate = [renamed.pop(f"{attention}{kind}_proj.weight") for kind in "qkv"]
        renamed[f"{attention}qkv.weight"] = cat(separate)
    model.load_state_dict(renamed)
    return model
