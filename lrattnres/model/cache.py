"""What attention keeps of the tokens it has read, so that a further token costs one token and not
the whole window.

A cache is a backend of attention like the others, whose mask says where the new tokens stand: the
sub-layers, and the depth router between them, are those that were trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lrattnres.model.attention import AttentionBackend


class Cache:
    """Keys and values by attention sub-layer, [B, S, heads, head_dim] each, of B windows of at most
    S tokens. A sub-layer that uses the values of another one keeps keys only.

    lengths: how many tokens each window has, on the CPU; documents: the number of the document at
    each position, int32 [B, S], counted up from 0 by the separators. Nothing beyond a window's
    length is ever seen.
    """

    def __init__(self, batch: int, size: int, device: torch.device):
        self.size = size
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.documents = torch.zeros(batch, size, dtype=torch.int32, device=device)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def select(self, rows: Sequence[int]) -> Cache:
        """A cache of these windows only, in this order; a window may be taken more than once."""
        kept = Cache(len(rows), self.size, self.documents.device)
        chosen = torch.tensor(rows, dtype=torch.int64)
        kept.lengths = self.lengths[chosen]
        chosen = chosen.to(self.documents.device)
        kept.documents = self.documents[chosen]
        kept.keys = {site: keys[chosen] for site, keys in self.keys.items()}
        kept.values = {site: values[chosen] for site, values in self.values.items()}
        return kept

    def place(self, opens: Tensor, counts: Tensor, *, restarts: bool) -> Place:
        """Where the next t tokens of every window stand, and what each of them sees; the windows
        grow by `counts`.

        opens: bool [B, t], which tokens open a document; counts: int64 [B] on the CPU, how many of
        the t are real, the rest being padding. `restarts`: whether attention stays inside a
        document. Raises ValueError if a token, padding included, has no room.
        """
        device, needed = self.documents.device, int(self.lengths.max()) + opens.shape[1]
        if needed > self.size:
            raise ValueError(
                f"{needed} tokens in a cache of {self.size}: make it larger, up to model.context"
            )
        rows = torch.arange(len(self.lengths), device=device).unsqueeze(1)
        lengths = self.lengths.to(device).unsqueeze(1)
        positions = lengths + torch.arange(opens.shape[1], device=device)
        newest = self.documents.gather(1, (lengths - 1).clamp(min=0))
        self.documents[rows, positions] = newest + opens.to(device).cumsum(1, dtype=torch.int32)
        visible = torch.arange(needed, device=device) <= positions.unsqueeze(-1)  # [B, t, needed]
        if restarts:
            seen = self.documents[:, :needed]
            visible &= seen.unsqueeze(1) == self.documents[rows, positions].unsqueeze(-1)
        self.lengths = self.lengths + counts
        return Place(rows, positions, visible.unsqueeze(1), self, None, None)

    def put(self, place: Place, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new tokens of one sub-layer; values only if they are its own.

        Returns:
            All keys and values that any of the tokens may see, [B, seen, heads, head_dim].
        """
        assert place.site is not None and place.values is not None
        seen = place.visible.shape[-1]
        if place.values == place.site:
            self._write(self.values, place, place.site, value)
        self._write(self.keys, place, place.site, key)
        return self.keys[place.site][:, :seen], self.values[place.values][:, :seen]

    def _write(self, stores: dict[int, Tensor], place: Place, site: int, new: Tensor) -> None:
        if site not in stores:
            stores[site] = new.new_zeros((new.shape[0], self.size, *new.shape[2:]))
        stores[site][place.rows, place.positions] = new


class Place(NamedTuple):
    """The mask of new tokens.

    Args:
        rows: int64 [B, 1], the windows.
        positions: int64 [B, t], where the tokens stand in them.
        visible: bool [B, 1, t, seen].
        cache: where their keys and values are kept.
        site: the sub-layer that attends.
        values: the sub-layer whose values it uses.
    """

    rows: Tensor
    positions: Tensor
    visible: Tensor
    cache: Cache
    site: int | None
    values: int | None


def _attend(query: Tensor, key: Tensor, value: Tensor, place: Place) -> Tensor:
    keys, values = place.cache.put(place, key, value)
    query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
    shared = keys.shape[1] != query.shape[1]  # fewer heads of keys than of queries
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=place.visible, enable_gqa=shared
    ).transpose(1, 2)


def _no_mask(documents: Tensor | None, batch: int, length: int, device: torch.device) -> Place:
    raise ValueError(
        "a model that decodes has no mask for whole windows; its masks come from Cache.place"
    )


CACHED = AttentionBackend(
    "cached",
    _no_mask,
    _attend,
    lambda device, dtype, training: "it decodes" if training else None,
    shares=True,
)
