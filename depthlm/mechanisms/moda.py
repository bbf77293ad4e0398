"""Mixture-of-Depths Attention, MoDA (arXiv 2603.15619): one softmax over the sequence and over depth.

    o_i = softmax([q_i . k_1, ..., q_i . k_i, q_i . key_1, ..., q_i . key_n] / sqrt(e)) . [v_1, ..., v_i, value_1, ...]

for the query at position i, with n depth entries (key_j, value_j) of earlier sublayers at position i. Layer 0 of the
first loop has none. The keys and values of a layer are an entry only for later layers. Projections of entries start
like all matrices, so the decoder does not initially equal vanilla.

Our addition: with start=identity, the result is (1 - g) x + g o, with the result x of attention over the sequence
alone and a parameter g of each query head that is initially 0, so that the decoder initially equals vanilla. In place
of g, a bias on the depth scores would have to be minus infinity, where it has no gradient.

Shapes: b batch, t new tokens, h query heads, k key/value heads, e head size.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.model.attention.context import AttentionContext
from depthlm.model.attention.self_attention import DepthKV, SelfAttention, attend_to, causal_attention
from depthlm.model.figures import Figure
from depthlm.model.layers import Linear, Rope
from depthlm.model.settings import at_least, boolean, check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.depth_reduce import interpolate
from depthlm.ops.functions import linear_together
from depthlm.ops.moda.bank import Bank, Depth
from depthlm.ops.moda.merge import merged_attention
from depthlm.ops.moda.naive import attend_with_scores, probabilities


class Moda(SelfAttention):
    """Self-attention over the sequence and over depth, in one softmax (section 2.2).

    Each query attends to the causal keys and values of its layer, and to the depth keys and values of all earlier
    sublayers at its own position.

    depth: (k, v) of earlier attentions and MLPs, at each position --.
    q, k, v ----------------------------------------> softmax over [sequence, depth] -> attended
            `-> (k, v), a depth entry of later layers
    MLP input -> ffn_k_proj, ffn_v_proj -> (k, v), the next depth entry

    depth_kv: whether the sequence keys and values of an attention are its depth entry; without effect with attn_kv.
    ffn_kv: whether each MLP adds an entry, projected from its input; its key gets this layer's K-norm and RoPE.
    attn_kv: whether an attention has a separate projection for its depth entry, even if depth_kv is false.
    last_layer_kv: whether the last layer has these projections although no layer reads them. With loops it always has.
    slots: the number of newest entries to keep; None: all.
    start: paper; identity: (1 - g) x + g o. It costs a second attention over the sequence.

    The depth list is a `Depth`, whose entries are in one tensor.
    """

    identity_start = "start=identity"
    colour = "#56B4E9"
    # the operators over depth share the softmax, and they have none
    has_dropout = False

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        depth_kv: bool = True,
        ffn_kv: bool = True,
        attn_kv: bool = False,
        last_layer_kv: bool = False,
        slots: int | None = None,
        start: str = "paper",
    ):
        super().__init__(spec, size, backbone)
        check(
            boolean(depth_kv=depth_kv, ffn_kv=ffn_kv, attn_kv=attn_kv, last_layer_kv=last_layer_kv),
            at_least(1, slots=slots, optional=True),
            one_of(("paper", "identity"), start=start),
        )
        self.depth_kv = depth_kv
        self.slots = slots
        self.is_read_later = spec.layer < spec.num_layers - 1 or spec.loops > 1
        projects = self.is_read_later or last_layer_kv
        self.ffn_kv = ffn_kv and projects
        self.attn_kv = attn_kv and projects
        # the sublayers of a layer that add an entry, in their order. Every layer adds all of them, but the last one in
        # the last loop adds none: open_depth, keep, figures, num_entries and held_values count on it
        self.entry_kinds = ("attention",) * (depth_kv or attn_kv) + ("mlp",) * ffn_kv
        d, bias = size.hidden_size, backbone.attention_bias and not self.is_latent
        key_width, value_width = self.num_kv_heads * self.key_size, self.num_kv_heads * self.head_size
        if self.attn_kv:
            self.attn_k_proj = Linear(d, key_width, bias)
            self.attn_v_proj = Linear(d, value_width, bias)
        if self.ffn_kv:
            self.ffn_k_proj = Linear(d, key_width, bias)
            self.ffn_v_proj = Linear(d, value_width, bias)
        if start == "identity" or not self.entry_kinds:
            self.identity_start = ""
        self.gate: nn.Parameter | None = None
        if start == "identity" and self.num_entries():
            self.gate = nn.Parameter(torch.empty(self.num_heads))
            self.fp32_parameters = ("gate",)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.zero_()

    def project(self, q_in: Tensor, k_in: Tensor, v_in: Tensor, rope: Rope | None) -> tuple[Tensor, ...]:
        projected = super().project(q_in, k_in, v_in, rope)
        if not self.attn_kv:
            return projected
        return *projected, *self.entry(self.attn_k_proj(k_in), self.attn_v_proj(v_in), rope)

    def open_depth(self) -> Depth:
        # nothing reads the entries of the last layer in the last loop
        return Depth(Bank(len(self.entry_kinds) * (self.spec.num_layers * self.spec.loops - 1)))

    def resume_depth(self, entries: DepthKV, loop: int) -> Depth:
        end = len(self.entry_kinds) * (loop * self.spec.num_layers + self.spec.layer)
        depth = Depth(self.open_depth().bank, end=end - len(entries))
        for k_bkte, v_bkte in entries:
            depth = depth.append(k_bkte, v_bkte)
        # the entries themselves, which later stages know, in place of their copies
        return Depth(depth.bank, tuple((k_bkte, v_bkte) for k_bkte, v_bkte in entries), depth.end, depth.token)

    def attend(
        self, projected: tuple[Tensor, ...], depth: DepthKV, context: AttentionContext
    ) -> tuple[Tensor, DepthKV]:
        q, k, v, *own_entry = projected
        kept = depth
        if own_entry:
            kept = self.keep(depth, *own_entry)
        elif self.depth_kv:
            # an entry of the bank is a key and a value of equal width
            kept = self.keep(depth, k, self.widen_values(v))
            if kept is not depth:
                # the bank has a copy, so nothing keeps the projections in memory
                k, v = kept[-1]
                v = self.narrow_values(v)
        if depth:
            assert isinstance(depth, Depth)
            bounds = context.bounds(q) if self.edit is None else None
            mask = None if bounds else context.mask_b1ts
            k, v = context.extend(k, v)
            if self.edit is None:
                attended = merged_attention(q, k, self.widen_values(v), depth, mask, bounds)
            else:
                edit = partial(self.edited_probabilities, entries=range(depth.start, depth.end), context=context)
                attended = attend_with_scores(q, k, self.widen_values(v), depth, mask, edit)
            attended = self.narrow_values(attended).transpose(1, 2)
            if self.gate is not None:
                without_depth = attend_to(q, k, v, context).unflatten(2, (self.num_heads, -1))
                attended = interpolate(without_depth, attended, self.gate[:, None])
            return attended.flatten(2), kept
        return causal_attention(q, k, v, context), kept

    def edited_probabilities(self, p_bhtx: Tensor, entries: range, context: AttentionContext) -> Tensor:
        """Return the probabilities that `edit` makes of these. All of the sequence is one part of their sum."""
        p_bhts, depth_bhtn = p_bhtx[..., : -len(entries)], p_bhtx[..., -len(entries) :]
        total_bht1 = p_bhts.sum(-1, keepdim=True)
        axes, sources = ("batch", "head", "token", "source"), (-1, *entries)
        edited = self.edited(torch.cat([total_bht1, depth_bhtn], -1), axes, context, sources, True)
        factor_bht1 = torch.where(total_bht1 > 0, edited[..., :1] / total_bht1, 0)
        return torch.cat([p_bhts * factor_bht1, edited[..., 1:]], -1)

    def project_mlp(self, mlp_input_btd: Tensor, rope: Rope | None) -> tuple[Tensor, ...]:
        if not self.ffn_kv:
            return ()
        k_flat, v_flat = linear_together(mlp_input_btd, self.ffn_k_proj, self.ffn_v_proj)
        return self.entry(k_flat, v_flat, rope)

    def after_mlp(self, projected: tuple[Tensor, ...], depth: DepthKV) -> DepthKV:
        return self.keep(depth, *projected) if projected else depth

    def entry(self, k: Tensor, v: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """Return the entry k_bkte, v_bkte of k_bt(ke), v_bt(ke). The key gets the K-norm of this layer and RoPE.

        Latent attention has neither.
        """
        if self.is_latent:
            k_bkte = k.unflatten(-1, (-1, self.key_size)).transpose(1, 2)
        else:
            k_bkte = self.rotate(k, self.k_norm if self.qk_norm != "none" else None, rope)
        return k_bkte, self.widen_values(self.heads(v).transpose(1, 2))

    def widen_values(self, v_bkte: Tensor) -> Tensor:
        """Return the values with zeros, as wide as the keys."""
        padding = self.key_size - self.head_size
        return F.pad(v_bkte, (0, padding)) if padding else v_bkte

    def narrow_values(self, x_bhte: Tensor) -> Tensor:
        """Return widened values, or weighted sums of them, without the zeros."""
        return x_bhte[..., : self.head_size] if self.is_latent else x_bhte

    def keep(self, depth: DepthKV, k_bkte: Tensor, v_bkte: Tensor) -> DepthKV:
        """Return the depth list with one more entry, limited to the newest `slots`.

        The last layer adds none in the last loop.
        """
        assert isinstance(depth, Depth)
        if depth.end == depth.bank.capacity and self.spec.layer == self.spec.num_layers - 1:
            return depth
        return depth.append(k_bkte, v_bkte, self.slots)

    def figures(self, projected: tuple[Tensor, ...], depth: DepthKV, context: AttentionContext) -> list[Figure]:
        assert isinstance(depth, Depth)
        q_bhte, k_bkte, *_ = projected
        (b, _, t, _), kinds = q_bhte.shape, len(self.entry_kinds)
        p_bhtx = probabilities(q_bhte, k_bkte, [key for key, _ in depth], context.mask_b1ts)
        if self.gate is not None:
            p_bhtt = F.pad(probabilities(q_bhte, k_bkte, [], context.mask_b1ts), (0, len(depth)))
            p_bhtx = interpolate(p_bhtt, p_bhtx, self.gate[:, None, None])
        share_nbt = p_bhtx[..., t:].mean(1).movedim(-1, 0)
        share = share_nbt.new_full((2, self.spec.num_layers * self.spec.loops, b, t), float("nan"))
        for number, entry_bt in enumerate(share_nbt, depth.start):
            share[("attention", "mlp").index(self.entry_kinds[number % kinds]), number // kinds] = entry_bt
        about = "the share of the attention that goes to each depth entry"
        about_total = "the share of the attention that goes to depth; the rest goes to the sequence"
        panels, places = ("attention entries", "MLP entries"), range(share.shape[1])
        axes = ("panel", "layer", "batch", "token")
        about_maps = "which tokens and depth entries queries attend to (the attention maps of arXiv 2603.15619)"
        return [
            Figure("depth_share", share, axes, about, "layer of the entry", panels, places),
            Figure("depth_total", share_nbt.sum(0), ("batch", "token"), about_total),
            Figure("maps", p_bhtx[0], ("head", "query", "key"), about_maps),
        ]

    def num_entries(self) -> float:
        """Return the number of depth entries that this layer's queries attend to, as a mean over the loops."""
        loops, layers = self.spec.loops, self.spec.num_layers
        counts = [len(self.entry_kinds) * (loop * layers + self.spec.layer) for loop in range(loops)]
        return sum(count if self.slots is None else min(count, self.slots) for count in counts) / loops

    def forward_flops(self, length: float, causal: bool) -> float:
        depth = 2.0 * self.num_heads * (self.key_size + self.head_size) * self.num_entries()
        if self.gate is not None:
            # a second attention over the sequence, and the sum of both results
            seen = length * (0.5 if causal else 1.0)
            depth += self.num_heads * (2.0 * (self.key_size + self.head_size) * seen + 3.0 * self.head_size)
        return super().forward_flops(length, causal) + depth

    def io_values(self) -> float:
        """Return the values of all entries that are read, and of the projected entries that are written.

        With start=identity, also both results, read, and their sum, written.
        """
        values = self.num_kv_heads * (self.key_size + self.head_size)
        gated = 0 if self.gate is None else 3 * self.num_heads * self.head_size
        return values * (self.num_entries() + self.ffn_kv + self.attn_kv) + gated

    def held_values(self) -> float:
        """Return the values of projected entries, which are not in the KV cache, that the last layer still reads."""
        if not self.is_read_later:
            return 0.0
        # entries that later layers append before that read
        newer = len(self.entry_kinds) * max(self.spec.num_layers - 2 - self.spec.layer, 0)
        kept = self.ffn_kv + self.attn_kv
        if self.slots is not None:
            kept = (self.ffn_kv and newer < self.slots) + (self.attn_kv and newer + self.ffn_kv < self.slots)
        return float(self.num_kv_heads * (self.key_size + self.head_size) * kept)
