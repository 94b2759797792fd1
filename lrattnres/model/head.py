"""The output head, and what becomes of its logits in training and evaluation: losses.

Losses are summed, never averaged: only whoever divides knows how many targets there are in all.
`whole` is the definition. `chunked` computes the same for some tokens at a time, and its gradient
at once: the logits of a batch never exist together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 256e6  # bytes of a forward pass's float32 logits above which `auto` takes chunks
ROWS = 128  # rows of a padded head are a multiple of it: the matrix units of a GPU need 16 bytes


class Losses(NamedTuple):
    """Losses of single tokens, or their sums.

    Attributes:
        cross_entropy: nats.
        squared_logsumexp: (log Σ exp logits)², what z-loss weighs.
        tokens: whether there is a target; as a sum, the number of targets.
    """

    cross_entropy: Tensor
    squared_logsumexp: Tensor
    tokens: Tensor

    def sums(self) -> Losses:
        """The sums over all tokens, float64 scalars."""
        return Losses(*(part.sum(dtype=torch.float64) for part in self))

    def total(self, z_loss: float) -> Tensor:
        """Σ cross-entropy + z · Σ logsumexp², a float64 scalar."""
        sums = self.sums()
        return sums.cross_entropy + z_loss * sums.squared_logsumexp


class Objective(NamedTuple):
    """What training minimises, not yet divided by the number of targets.

    Attributes:
        total: Σ cross-entropy + z · Σ logsumexp², a float64 scalar. Only it has a gradient.
        losses: of single tokens, float32 (float64 where the hidden states are); zero where there
            is no target.
    """

    total: Tensor
    losses: Losses


class LossForm(NamedTuple):
    """A way to compute head and losses.

    Attributes:
        name: its name in LOSSES.
        compute: (hidden [..., d], weight [vocabulary, d], targets int64 [...], z) -> Objective.
        compiled: whether what is computed of a chunk's logits is compiled.
        reason: why it was chosen; "" in LOSSES.
    """

    name: str
    compute: Callable[..., Objective]
    compiled: bool = False
    reason: str = ""


def token_losses(logits: Tensor, targets: Tensor) -> Losses:
    """The losses of every position, computed in float32 (float64 where the logits are).

    Args:
        logits: [..., vocabulary], any floating dtype.
        targets: int64 [...]; negative where there is none.
    """
    valid = targets >= 0
    logits = logits.to(_wide(logits))
    logsumexp = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return Losses((logsumexp - chosen) * valid, logsumexp.square() * valid, valid)


def whole(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, *, compiled: bool = False
) -> Objective:
    """By the logits of all tokens."""
    logits = F.linear(hidden, padded(weight, hidden.dtype))[..., : len(weight)]
    losses = token_losses(logits, targets)
    return Objective(losses.total(z_loss), Losses(*(part.detach() for part in losses)))


def chunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, *, compiled: bool = False
) -> Objective:
    """By the logits of some tokens at a time."""
    inputs = (hidden.flatten(0, -2), weight, targets.flatten(), z_loss)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        total, *parts = ChunkedLoss.apply(*inputs, compiled)
    else:
        parts = list(_compute()(*inputs, False, compiled)[:2])
        total = None
    valid = targets >= 0
    cross_entropy, squared = (part.view(targets.shape) for part in parts)
    losses = Losses(cross_entropy, squared, valid)
    return Objective(losses.total(z_loss) if total is None else total, losses)


LOSSES = {form.name: form for form in (LossForm("whole", whole), LossForm("chunked", chunked))}


def choose_loss(
    name: str, device: torch.device, tokens: int, vocabulary: int | None, *, compiled: bool
) -> LossForm:
    """Chooses how head and losses are computed, and gives the reason.

    `auto` takes chunks, which move less memory, but where the model is compiled: there its own code
    does as well, as long as the logits are no burden.

    Args:
        name: auto, or a name in LOSSES.
        device: Where the model runs.
        tokens: Of a forward pass.
        vocabulary: Rows of the head.
        compiled: Whether the model is compiled.
    """
    assert vocabulary is not None, "model.vocabulary must be resolved before a model is built"
    reason = "as asked for"
    if name == "auto":
        size = 4 * tokens * vocabulary
        small = compiled and size <= LARGE
        name = "whole" if small else "chunked"
        state = "compiled" if compiled else "not compiled"
        logits = f", and its logits are {size / 1e6:,.0f} MB in float32" if compiled else ""
        reason = f"chosen by loss=auto: the model is {state}{logits}"
    return LOSSES[name]._replace(compiled=compiled or device.type == "cuda", reason=reason)


class Head(nn.Module):
    """Logits of hidden states [..., d], or their losses, in the precision of the hidden states.

    Args:
        form: how losses are computed.
    """

    weight: Tensor  # [vocabulary, d]

    def __init__(self, form: LossForm):
        super().__init__()
        self.form = form

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, z_loss: float = 0.0
    ) -> Tensor | Objective:
        if targets is None:
            return F.linear(hidden, self.weight.to(hidden.dtype))
        form = self.form
        return form.compute(hidden, self.weight, targets, z_loss, compiled=form.compiled)


class OwnHead(Head):
    """A head with a matrix of its own."""

    def __init__(self, vocabulary: int, dim: int, form: LossForm):
        super().__init__(form)
        self.weight = nn.Parameter(torch.empty(vocabulary, dim))


class TiedHead(Head):
    """A head with the embedding's matrix, which stays the embedding's parameter."""

    def __init__(self, embedding: nn.Embedding, form: LossForm):
        super().__init__(form)
        self._embedding = (embedding,)  # not a submodule: the matrix has one name

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self._embedding[0].weight


class ChunkedLoss(torch.autograd.Function):
    """total, cross-entropy [N] and squared logsumexp [N] of hidden [N, d], weight and targets [N].

    The gradients of `total` are known as soon as the logits are, so the forward pass makes them,
    and the backward pass multiplies them by one number. The logits are not needed a second time.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, compiled: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        results = _compute()(hidden, weight, targets, z_loss, True, compiled)
        cross_entropy, squared, of_hidden, of_weight = results
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.mark_non_differentiable(cross_entropy, squared)
        total = Losses(cross_entropy, squared, targets >= 0).total(z_loss)
        return total, cross_entropy, squared

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise RuntimeError("loss=chunked has no second derivative; write loss=whole")
        return *(part * gradient for part in ctx.saved_tensors), None, None, None


def chunk_tokens(dim: int) -> int:
    """Tokens of a chunk.

    The sum of the head's gradient, vocabulary · d float32 numbers, is read and written once a
    chunk: 8d bytes for each row of the head. The logits of a chunk take at least 12 bytes for each
    row and token. With 4d tokens the sum adds a sixth to that.
    """
    return 4 * dim


def compute_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, gradients: bool, compiled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The losses of every token, and the gradients of their total.

    Args:
        hidden: [N, d].
        weight: [vocabulary, d]; it is used in the dtype of `hidden`.
        targets: int64 [N]; negative where there is none.
        z_loss: z.
        gradients: Whether gradients are wanted.
        compiled: Whether `chunk_losses` is compiled.

    Returns:
        Cross-entropy and squared logsumexp, float32 [N] (float64 where `hidden` is), zero where
        there is no target; the gradients of hidden and weight in their dtypes, empty if they are
        not wanted. The gradient of the weight is summed over chunks in float32.
    """
    head, rows = padded(weight, hidden.dtype), len(weight)
    cross_entropy, squared = (hidden.new_empty(len(hidden), dtype=_wide(hidden)) for _ in range(2))
    of_hidden, of_head = hidden.new_empty(0), weight.new_empty(0)
    if gradients:
        of_hidden, of_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=_wide(head))
    of_chunk = _compiled_chunk() if compiled else chunk_losses
    for start in range(0, len(hidden), chunk_tokens(hidden.shape[1])):
        part = slice(start, start + chunk_tokens(hidden.shape[1]))
        logits = hidden[part] @ head.T
        logits[:, rows:] = -torch.inf  # padding: no softmax sees it
        found, square, of_logits = of_chunk(logits, targets[part], z_loss, gradients)
        cross_entropy[part], squared[part] = found, square
        if of_logits is not None:
            torch.mm(of_logits, head, out=of_hidden[part])
            _add_product(of_head, of_logits.T, hidden[part])
    return cross_entropy, squared, of_hidden, of_head[:rows].to(weight.dtype)


def chunk_losses(
    logits: Tensor, targets: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross-entropy and squared logsumexp of some tokens, and the gradient of their total.

    With p = softmax(logits) and l = logsumexp(logits), it is (1 + 2·z·l) · p, less 1 at the target.

    Args:
        logits: [tokens, rows].
        targets: int64 [tokens]; negative where there is none.
        z_loss: z.
        gradients: Whether the gradient is wanted.
    """
    wide, valid, index = _wide(logits), targets >= 0, targets.clamp(min=0)[:, None]
    log_p = F.log_softmax(logits, 1, dtype=wide)
    found = -log_p.gather(1, index)
    logsumexp = logits.gather(1, index).to(wide) + found
    factor = (1 + 2 * z_loss * logsumexp) * valid[:, None]
    of_logits = None
    if gradients:
        of_logits = log_p.exp_().mul_(factor).to(logits.dtype)
        of_target = (-found).exp() * factor - valid[:, None].to(wide)
        of_logits = of_logits.scatter_(1, index, of_target.to(logits.dtype))
    return found.squeeze(1) * valid, logsumexp.squeeze(1).square() * valid, of_logits


def padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in another dtype, on a GPU with rows of zeros up to a multiple of ROWS."""
    extra = -len(weight) % ROWS if _pads(weight, dtype) else 0
    return F.pad(weight.to(dtype), (0, 0, 0, extra)) if extra else weight.to(dtype)


def _pads(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.is_cuda and dtype.itemsize == 2


def _wide(tensor: Tensor) -> torch.dtype:
    """Float32, or float64 where the tensor is."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, which may be float32 where the factors are not."""
    if total.is_cuda and left.dtype is not total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif not total.is_meta:  # where nothing is computed, a GPU's memory is what is counted
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


@cache
def _compiled_chunk() -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    return torch.compile(chunk_losses, fullgraph=True)


def _compute() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What is compiled sees one operator: a loop over chunks would be unrolled, and the compiler
    might have the logits of several chunks at one time.
    """
    return chunks_operator if torch.compiler.is_compiling() else compute_chunks


chunks_operator = torch.library.custom_op(
    "lrattnres::chunked_loss", compute_chunks, mutates_args=()
)


@chunks_operator.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, gradients: bool, compiled: bool
) -> Any:
    losses = (hidden.new_empty(len(hidden), dtype=_wide(hidden)) for _ in range(2))
    parts = (hidden, weight)
    return *losses, *(torch.empty_like(p) if gradients else p.new_empty(0) for p in parts)
