"""A model's interface to attention: a plan that takes keys and values and answers queries.

The builder of the plan decides where keys are stored, how they are rotated and which tokens each row sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.shape import ModelShape


class StepPlan(Protocol):
    """Attention of one step over all its R rows.

    k and q are not rotated; the plan rotates them. They may be views into a wider tensor: the last dimension is
    contiguous, the row stride arbitrary. Keys and values must stay valid until `attend` of their layer returns, because
    a plan may store them only then.

    A plan of the C++ kernels also has `address`, an int: the address of kernels/attention.h's Plan, for a stack of
    layers that calls attention itself. A plan that must see each layer's keys or queries has none.
    """

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores the keys and values of the step's rows, [R, H, D] each. Called before `attend` of the same layer."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of q [R, H*G, D] over the tokens that each row sees; [R, H*G*D], which the next call may
        overwrite.
        """


class Model(Protocol):
    """A decoder with its weights packed for one device.

    key_bias  float32 [L, H, D]: the bias that it adds to every key before rotation; None without bias, or if keys are
              normalised after it is added
    """

    shape: ModelShape
    key_bias: Tensor | None

    def hidden(self, tokens: Tensor, positions: Tensor, plan: StepPlan) -> Tensor:
        """Runs one step up to the last norm.

        tokens     int64 [R]
        positions  int64 [R], the tokens' positions in their own sequences
        returns    [R, E] in the model's dtype
        """
        state = self.begin(tokens, positions)
        for index in range(self.shape.num_layers):
            state = self.layer(index, state, plan)
        return self.finish(state)

    def begin(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """The input of the first layer. `hidden` is begin, every layer in turn, finish."""

    def layer(self, index: int, state: tuple[Tensor, ...], plan: StepPlan) -> tuple[Tensor, ...]:
        """The output of layer `index`; may overwrite its input."""

    def finish(self, state: tuple[Tensor, ...]) -> Tensor:
        """The result of `hidden` from the output of the last layer."""

    def head(self, hidden: Tensor) -> Tensor:
        """The logits of some rows of `hidden`, [n, E]: float32 [n, vocab] for every dtype of the model."""
