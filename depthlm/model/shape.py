"""The size and the backbone of a decoder, and the place of a sublayer: everything but the depth mechanism."""

from dataclasses import dataclass
from typing import Literal

from depthlm.fields import TINY, key

Mixer = Literal["attention", "latent", "delta"]


@dataclass(frozen=True)
class Size:
    """The dimensions of a decoder, and its published learning rate and sequence length."""

    name: str = key("", "name of the size, for reports")
    hidden_size: int = key(0, "width D of the depth stream", minimum=1)
    intermediate_size: int = key(0, "width of the MLP", minimum=1)
    num_layers: int = key(0, "layers L, each one attention and one MLP", minimum=1)
    num_heads: int = key(0, "query heads H; H times head_size need not be hidden_size", minimum=1)
    num_kv_heads: int = key(0, "key/value heads K of mixer attention; divides num_heads", minimum=1)
    head_size: int = key(0, "size d of one head; even, for RoPE", minimum=1)
    vocab_size: int = key(
        0, "vocabulary V; raised to the tokenizer's padded one if that is larger", minimum=2, protocol=False
    )
    init_std: float = key(0.02, "standard deviation of every matrix at the start", above=0)
    embedding_init_std: float | None = key(
        None, "standard deviation of the embedding at the start; null: init_std, or 1 with sinusoids", above=0
    )
    lr: float = key(1e-3, "peak learning rate of this size; the default of optimizer.lr", above=0)
    sequence_length: int = key(2048, "tokens of a sequence; the default of training.sequence_length", minimum=1)
    num_experts: int = key(8, "backbone.mlp=experts: experts of a layer", minimum=1)
    experts_per_token: int = key(2, "backbone.mlp=experts: experts that a token is sent to", minimum=1)
    expert_size: int | None = key(
        None, "backbone.mlp=experts: width of an expert; null: intermediate_size / experts_per_token", minimum=1
    )
    latent_size: int | None = key(
        None, "mixer latent: width of the latent of keys and values; null: 4 * head_size", minimum=1
    )
    shared_key_size: int | None = key(
        None, "mixer latent: values of a key that all heads share; null: head_size / 2", minimum=1
    )
    paper: dict[str, str] = key(
        {},
        "source: the paper that has this size; size, backbone, data: those of its models, which the start of a run "
        "names if it has others",
        on_resume="free",
        protocol=False,
    )

    def width_of_expert(self) -> int:
        """Return the width of one expert. By default, the experts of a token are together as wide as the MLP."""
        return self.expert_size or max(self.intermediate_size // self.experts_per_token, 1)

    def width_of_latent(self) -> int:
        """Return the width of the latent. The default is that of DeepSeek-V2 (arXiv 2405.04434, section 2.1.4)."""
        return self.latent_size or 4 * self.head_size

    def width_of_shared_key(self) -> int:
        """Return the shared values of a key, by default as many as in DeepSeek-V2 (section 2.1.4)."""
        return self.shared_key_size or max(self.head_size // 2, 1)


@dataclass(frozen=True)
class Backbone:
    """The architecture of a layer, independent of the depth mechanism."""

    name: str = key("", "name of the backbone, for reports")
    norm: Literal["rmsnorm", "layernorm"] = key(
        "rmsnorm", "kind of every norm but those inside mixers latent and delta, which are RMSNorm"
    )
    norm_placement: Literal["pre", "post", "both", "none"] = key(
        "pre", "pre: f(norm(x)); post: norm(f(x)) (OLMo2); both: norm(f(norm(x))); none: f(x)"
    )
    norm_eps: float = key(1e-5, "epsilon of every norm but those inside mixers latent and delta", minimum=TINY)
    qk_norm: Literal["head", "full", "none"] = key(
        "head", "norm of q and k of mixer attention before RoPE: per head, over the full width, or none"
    )
    mlp: Literal["swiglu", "relu", "experts"] = key(
        "swiglu", "swiglu: down(silu(gate) * up); relu: down(relu(up)); experts: a mixture of SwiGLU experts"
    )
    position: Literal["rope", "sinusoidal", "none"] = key(
        "rope", "rope on q and k of mixer attention, sinusoidal embeddings added to the tokens', or none"
    )
    rope_theta: float = key(10000.0, "base of the RoPE frequencies", above=0)
    attention_bias: bool = key(False, "biases on the q, k, v and output projections of mixer attention")
    mlp_bias: bool = key(False, "biases on the MLP's matrices")
    dropout: float = key(
        0.0,
        "probability of a value to become zero in training: of the embedding with its positions, of the weights of "
        "mixers attention and latent, which then store all of them, of the MLP's hidden layer, and of the output of "
        "each sublayer",
        minimum=0,
        maximum=0.99,
    )
    head_bias: bool = key(False, "a bias on the logits")
    tie_embeddings: bool = key(False, "the head uses the embedding matrix")
    init: Literal["normal", "truncated_normal", "xavier_uniform"] = key(
        "normal",
        "values of matrices at the start. normal: of standard deviation size.init_std; truncated_normal: the same, cut "
        "off at three standard deviations (OLMo2); xavier_uniform: within sqrt(6 / (inputs + outputs)), but normal in "
        "the embedding (Flax's LM1B example)",
    )
    bias_init_std: float = key(0.0, "standard deviation of the biases of linear layers at the start", minimum=0)
    dense_layers: int = key(0, "mlp=experts: the first layers have one SwiGLU of intermediate_size", minimum=0)
    shared_experts: int = key(0, "mlp=experts: experts that every token passes through", minimum=0)
    router_scores: Literal["softmax", "sigmoid"] = key("softmax", "mlp=experts: scores of the router's logits")
    router_normalize: bool = key(False, "mlp=experts: divide the weights of a token's experts by their sum")
    router_scale: float = key(1.0, "mlp=experts: factor of the weights of a token's experts", above=0)
    router_groups: int = key(1, "mlp=experts: groups of experts; divides size.num_experts", minimum=1)
    router_groups_kept: int = key(1, "mlp=experts: groups from which the experts of a token are chosen", minimum=1)
    router_bias_rate: float = key(
        0.0, "mlp=experts: step of the bias that balances the load, after each update; 0: no bias", minimum=0
    )
    router_balance_loss: float = key(
        0.0, "mlp=experts: weight of the loss that balances the load, k at best (docs/experts.md)", minimum=0
    )
    router_z_loss: float = key(0.0, "mlp=experts: weight of mean(logsumexp(logits)^2) of the router", minimum=0)
    mixers: list[Mixer] = key(
        ["attention"],
        "how the layers mix tokens, repeated; the last layer has the last one. attention: softmax over the sequence; "
        "latent: the same over keys and values from a latent (DeepSeek-V2); delta: Kimi Delta Attention, with a state",
        min_length=1,
    )

    def mixers_of(self, num_layers: int) -> list[Mixer]:
        """Return the mixer of each layer: `mixers` again and again, but its last one in the last layer."""
        names = [self.mixers[layer % len(self.mixers)] for layer in range(num_layers)]
        return [*names[:-1], self.mixers[-1]]


@dataclass(frozen=True)
class Parametrization:
    """How initial values, rates, decay and epsilon follow from width and depth (see depthlm.optimizers)."""

    name: Literal["standard", "mup", "completep"] = key(
        "standard",
        "standard: as given; mup: such that the best learning rate of base_size is the best at other widths (AdamW and "
        "its relatives); completep: also at other depths",
    )
    base_size: str | Size | None = key(
        None,
        "mup and completep: the size, as in size=, at which learning rate, decay and initial values are as given; by "
        "default they are those of this size",
    )


@dataclass(frozen=True)
class SublayerSpec:
    """The place of a connection or an attention in a decoder.

    layer: index from 0. For a connection of a looped decoder this is the unrolled position, since each loop has its own
        connections. The loops share their attentions. For an attention it counts the layers with keys and values.
    kind: "attention" or "mlp" for a sublayer, "final" for the read before the final norm (its layer is num_layers).
    num_layers: the number of layers, counted like `layer`.
    loops: the number of passes through the layers. Only an attention needs it.
    mixer: attention or latent, as in `Backbone.mixers`. Only an attention needs it.
    """

    layer: int
    kind: str
    num_layers: int
    loops: int = 1
    mixer: Mixer = "attention"

    @property
    def sublayer(self) -> int:
        """Index of the sublayer, 0 to 2 * num_layers - 1; 2 * num_layers for the final read."""
        return 2 * self.layer + (self.kind == "mlp")
