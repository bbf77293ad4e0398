"""The interface of a connection: how a sublayer reads from the depth stream and writes to it.

Shapes: b batch, t tokens, d hidden size, n sources.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from depthlm.model.edges import Edit, Reader, describe_axes
from depthlm.model.read_ahead import ReadAhead
from depthlm.model.shape import Backbone, Size, SublayerSpec

# the state of a mechanism: a NamedTuple of its own, which passes from sublayer to sublayer
State = Any
Inputs = tuple[Tensor, ...]


class Cost(NamedTuple):
    """What a connection costs per token in one forward pass, if each operation of its formula runs alone.

    flops: without those of its `nn.Linear` children. io_values: the activation values that it reads and writes beyond
    those of the residual connection. Fused operators move fewer. two_phase_values: in all, in inference, as in Table 1
    of Attention Residuals (arXiv 2603.15031), where several reads share a pass over old sources; None: each read alone.
    """

    flops: float = 0.0
    io_values: float = 0.0
    two_phase_values: float | None = None


class Connection(nn.Module):
    """How one sublayer reads from the depth stream and writes to it.

    A decoder has one connection per sublayer and one for the final read. A decoder of L layers makes these calls:

        embedding_btd -> open -> state
        2L times:   state -> read -> inputs, carry;   f(inputs) -> output;   state, output, carry -> write -> state
        state -> close -> hidden_btd -> final norm

    The decoder calls `open` of the first connection and `close` of the last one. The state is a NamedTuple that each
    mechanism defines, and all that passes from one sublayer to the next. No method changes it or a tensor in place.
    With a pre-norm backbone, the layer normalizes the inputs after `read`. The carry is any value that `read`
    computes for the `write` of the same sublayer, or None. Fields `ahead` and `pending` of a state hold what makes
    it fast: reads made ahead for later sublayers, and a write that the next read performs. All other fields are
    those of the formula. A state with a field `pending` has a method `settled`, which returns the state with that write
    performed.

    A subclass defines `read` and `write`, and those of the other six that it needs: `open`, `close`, `weights`,
    `diagnostics`, `retained`, and `init_parameter` if it owns parameters (see `depthlm.model.parameters`).
    In `__init__` it sets what it costs. It may also set `optimizer_settings` and `fp32_parameters` (see
    `depthlm.model.parameters`). `colour` and `figures` are for reports and `inspect` alone, which look them up
    (see docs/your_own_mechanism.md).

    num_inputs: the number of inputs of `read`: 1, or 3 for q, k and v of an attention, each with its own norm.
    read_ahead: reads several sublayers at once (see `depthlm.model.read_ahead`); None: each reads alone.
    output_gain: the factor of the initial values, outputs and MLP matrices of the sublayer.
    accumulates: how many outputs of sublayers a read adds to the embedding, in a sum or a mean: "sum": all before it; a
        number: the newest ones; None: undefined, for the reason `why_undefined`. `parametrization=completep` divides
        outputs by the growth of this number with the depth.
    identity_start: the setting, such as "start=identity", with which a decoder initially computes what vanilla computes
        with the same weights; "": it does; None: no setting does. A run with `init_from` logs it.
    is_compiled: whether torch.compile may compile `read` and `write` together with the sublayers beside them. They must
        then be short, without registered operators, and the same for all layers, on a state of constant length.
    edit: changes the weights of its sources, which it passes to `edited` before it uses them (see
        `depthlm.model.edges`); None: they are used as they are, by faster operators.
    """

    num_inputs = 1
    cost = Cost()
    read_ahead: ReadAhead | None = None
    output_gain = 1.0
    accumulates: Literal["sum"] | int | None = None
    why_undefined = "it does not say how many outputs a read adds up (Connection.accumulates)"
    identity_start: str | None = None
    is_compiled = False
    edit: Edit | None = None

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__()
        self.spec = spec
        self.size = size
        self.is_linked = False

    def link(self, connections: "Sequence[Connection]") -> None:
        """Receive the connections whose parameters `read` may use: all of the decoder, or only this one.

        The decoder passes all of its connections after it has created them. `Decoder.read_alone` passes only one.
        """
        self.is_linked = len(connections) > 1
        if self.read_ahead is not None:
            self.read_ahead.link(connections)

    def open(self, embedding_btd: Tensor) -> State:
        """Return the state before the first sublayer. By default it is that of the residual connection."""
        return Hidden(embedding_btd)

    def read(self, state: State, weights: Any = None) -> tuple[Inputs, Any]:
        """Return the inputs of this sublayer, x_btd each, and the carry. Every subclass must define it.

        weights: use these instead of `weights(state)`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no read(state, weights)")

    def weights(self, state: State) -> Any:
        """Return the weights of the read that depend on the state, as one tensor or several.

        With them as constants, the inputs are a linear function of all outputs of earlier sublayers, and its
        derivatives are the depth mixing matrix that `inspect` draws. So whatever is not linear in the sources,
        such as a norm of them, must be part of the weights. None: the read is linear in any case.
        """
        return None

    def edited(
        self, weights: Tensor, axes: tuple[str, ...], sources: Sequence[int] = (), normalized: bool = False
    ) -> Tensor:
        """Return the weights that a read uses. axes, sources, normalized: see `depthlm.model.edges.Edges`."""
        if self.edit is None:
            return weights
        edges = describe_axes(weights, axes, sources, normalized)
        return self.edit(Reader(self.spec.kind, self.spec.layer), weights, edges)

    def write(self, state: State, output_btd: Tensor, carry: Any) -> State:
        """Return the state after this sublayer. Every subclass must define it."""
        raise NotImplementedError(f"{type(self).__name__} defines no write(state, output_btd, carry)")

    def close(self, state: State) -> Tensor:
        """Return the hidden state before the final norm. By default this is one more read."""
        return self.read(state)[0][0]

    def retained(self, state: State) -> list[Tensor]:
        """Return the distinct tensors of a state that this sublayer and later ones need.

        They are in memory during a forward pass, and a pipeline sends them to the stage that begins with this sublayer.
        By default these are all but those of the fields `ahead`, which every stage can compute, and `pending`, whose
        write is performed first.
        """
        fields = [value for name, value in state._asdict().items() if name not in ("ahead", "pending")]
        return list({id(x): x for x in tree_leaves(fields) if isinstance(x, Tensor)}.values())

    def settle(self, state: State) -> State:
        """Return a state as a pipeline sends it: without reads made ahead, and with its pending write performed."""
        if getattr(state, "pending", None) is not None:
            if not hasattr(state, "settled"):
                raise TypeError(
                    f"{type(state).__qualname__}: has a field `pending` and no method `settled`, which returns the "
                    "state with that write performed; a pipeline calls it"
                )
            state = state.settled()
        return state._replace(ahead=()) if getattr(state, "ahead", ()) else state

    def diagnostics(self, state: State, memory: dict[str, Any]) -> dict[str, Tensor]:
        """Return named tensors of any shape that describe the read of this state.

        Each validation logs the largest value of each name over all tokens and sublayers.

        memory: what the connections of earlier sublayers stored in this forward pass, for values that follow from all
        of them; empty for the first one.
        """
        return {}


class Hidden(NamedTuple):
    """The state of a connection that needs only the hidden state h_btd."""

    h: Tensor


class ConnectionFactory(Protocol):
    """A connection class whose own settings are bound with `functools.partial`."""

    def __call__(self, spec: SublayerSpec, size: Size, backbone: Backbone) -> Connection: ...
