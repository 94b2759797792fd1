"""A trained model that reads a window piece by piece: its logits are those of one pass over the
whole window.

Depth can be read in two phases, as the papers describe it: the sources that are closed when a group
of sites begins are read once for all of its sites, and a site merges what was written since by an
online softmax (residual/fused/). That saves memory traffic. On a CPU the sources of a token stay in
its caches, and there each site reads all of them at once, which takes fewer operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrattnres.kernels.backends import KERNELS, DepthKernels
from lrattnres.kernels.stacked import STACKED
from lrattnres.model.cache import CACHED, Cache
from lrattnres.model.layers import Context
from lrattnres.model.transformer import Transformer
from lrattnres.residual.base import path_of


class Decoder:
    """`model` with a cache in place of its attention over whole windows; the weights are the
    model's own, not copies.

    separator: the token that opens a document; documents: whether attention stays inside one, as it
    was trained.
    two_phase: whether the sites of a block read the closed sources together, for a token at a time;
    None: on a GPU. (A prompt is read with the model's own kernels, in the groups that these have.)
    """

    def __init__(
        self,
        model: Transformer,
        separator: int,
        *,
        documents: bool = True,
        two_phase: bool | None = None,
    ):
        self.separator, self.documents, self.context = separator, documents, model.config.context
        self.many = _twin(model, model.kernels)
        alone = path_of(model.config).beyond_kernels(model.config)
        self.one = _twin(model, KERNELS["reference"] if alone else STACKED)
        self.head, self.device = self.one.head, model.head.weight.device
        self.two_phase = self.device.type != "cpu" if two_phase is None else two_phase
        self.one.router.decodes(together=self.two_phase)
        self._angles = model.angles(self.context, self.device)

    def cache(self, batch: int, size: int | None = None) -> Cache:
        """An empty cache for windows of at most `size` tokens; None: the context. Raises ValueError
        beyond the context.
        """
        if size is not None and not 1 <= size <= self.context:
            raise ValueError(
                f"size={size}: the model was trained on windows of {self.context} tokens; "
                f"write 1 to {self.context}"
            )
        return Cache(batch, size or self.context, self.device)

    @torch.no_grad()
    def feed(self, cache: Cache, tokens: Tensor, counts: Tensor | None = None) -> Tensor:
        """Reads the next tokens [B, t] of every window; returns what `head` takes at each of them,
        [B, t, d].

        counts: int64 [B], how many of a row are real, for rows of unequal length: the others are
        padding, and what comes out at them means nothing. Raises ValueError for tokens that the
        cache has no room for.
        """
        length = tokens.shape[1]
        counts = torch.full((len(tokens),), length) if counts is None else counts.cpu()
        tokens = tokens.to(self.device)
        place = cache.place(tokens == self.separator, counts, restarts=self.documents)
        model = self.one if length == 1 else self.many
        cosines, sines = self._angles
        rotation = cosines[place.positions], sines[place.positions]
        state = model.router.begin(model.embedding(tokens).to(model.dtype))
        for site in range(len(model.sublayers)):
            values = model.router.value_site(model.config, site)
            context = Context(place._replace(site=site, values=values), rotation)
            state = model.step(model.router, state, site, context)
        return model.last_read(model.router, state)


def _twin(model: Transformer, kernels: DepthKernels) -> Transformer:
    with torch.device("meta"):
        twin = Transformer(model.config, CACHED, model.dtype, kernels)
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin.requires_grad_(False)
