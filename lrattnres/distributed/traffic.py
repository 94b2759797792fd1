"""What a rank sends to others, counted where every collective passes: in torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operator -> (its kind, the argument that holds what this rank gives).
OPERATORS = {
    "c10d::allgather_": ("all_gather", "input_tensors"),
    "c10d::_allgather_base_": ("all_gather", "input_tensor"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
}
# (bytes given, ranks of the group) -> bytes sent, where every byte takes the shortest way; a ring
# sends just that.
SENT: dict[str, Callable[[int, int], int]] = {
    "all_gather": lambda size, ranks: size * (ranks - 1),
    "reduce_scatter": lambda size, ranks: size * (ranks - 1) // ranks,
    "all_reduce": lambda size, ranks: -(-2 * size * (ranks - 1) // ranks),
}
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class Traffic(TorchDispatchMode):
    """While open, counts the bytes that leave this rank for another one.

    Those of the backward pass count too, and so do the few bytes with which ranks decide together.

    Attributes:
        sent: Bytes by the kind of collective.

    Raises:
        NotImplementedError: A collective comes by that it cannot count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = dict.fromkeys(KINDS, 0)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled: they hold no collective."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor first turns it into operations and collectives of shards: those come here.
            return NotImplemented
        if function.namespace in ("c10d", "_c10d_functional"):
            self._count(
                function._schema.name,
                dict(zip((item.name for item in function._schema.arguments), args, strict=False)),
            )
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, given: dict[str, Any]) -> None:
        if name == "c10d::barrier" or not {"group_name", "process_group"} & given.keys():
            return  # to wait, or to wrap a result, sends nothing
        if name not in OPERATORS:
            raise NotImplementedError(
                f"{name}: its bytes are not counted; write instruments.ranks=null"
            )
        kind, argument = OPERATORS[name]
        size = sum(
            tensor.nbytes for tensor in tree_leaves(given[argument]) if isinstance(tensor, Tensor)
        )
        boxed = given.get("process_group")
        group = (
            _resolve_process_group(given["group_name"])
            if boxed is None
            else ProcessGroup.unbox(boxed)
        )
        if kind == "all_to_all":
            rows, mine = given[argument].shape[0], given["input_split_sizes"]
            kept = mine[group.rank()] if mine else rows // group.size()
            self.sent[kind] += size * (rows - kept) // max(rows, 1)
        else:
            self.sent[kind] += SENT[kind](size, group.size())
