"""Where each token of a text reads: α of every token, site and source."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrattnres.data.packing import segments
from lrattnres.evaluation.words import Words
from lrattnres.model.transformer import Transformer
from lrattnres.residual.base import State
from lrattnres.residual.probe import source_name


@torch.no_grad()
def depth_reads(
    model: Transformer, tokens: Tensor, separator: int, *, documents: bool
) -> dict[int, Tensor]:
    """The weight α that each token, at each site, gives each source.

    Args:
        model: The model.
        tokens: int64 [T], one window.
        separator: The token that begins a document.
        documents: Whether attention stays inside a document.

    Returns:
        α by the site t = 2..M+1, float32 [T, sources] on the CPU, the sources as the plan has them
        and the mean of several heads. Site t feeds sub-layer t, and site M+1 the head; site 1 has
        one source and no choice. Empty where nothing routes.
    """
    window = tokens.unsqueeze(0).to(model.head.weight.device)
    numbers = segments(window, separator) if documents else None
    found: dict[int, Tensor] = {}

    def observe(site: int, state: State) -> None:
        weights = model.router.weights(state, site)
        if weights is not None:
            found[site + 1] = (weights if model.router.heads == 1 else weights.mean(-2))[0].cpu()

    model(window, model.mask(numbers, *window.shape), observe)
    return found


def reads_record(
    model: Transformer, words: Words, tokens: Tensor, *, documents: bool
) -> dict[str, Any]:
    """`depth_reads` for JSON: tokens with their spelling; and of every site its sources and α.

    A token that is part of a character is spelled by its bytes, as \\xe2; α has six decimals.
    """
    reads = depth_reads(model, tokens, words.prefix, documents=documents)
    path, last = model.router, len(model.sublayers)
    names = [words.spell([token]).decode("utf-8", "backslashreplace") for token in tokens.tolist()]
    return {
        "tokens": [
            {"token": token, "text": name}
            for token, name in zip(tokens.tolist(), names, strict=True)
        ],
        "sites": [
            {
                "site": site,
                "feeds": "head" if site > last else "attention" if site % 2 else "mlp",
                "sources": [source_name(members) for members in path.sources_of(site - 1)],
                "weights": [[round(alpha, 6) for alpha in row] for row in weights.tolist()],
            }
            for site, weights in reads.items()
        ],
    }
