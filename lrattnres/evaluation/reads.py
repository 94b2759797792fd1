"""Where each token of a text reads: α, or coefficients, of every token and site."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrattnres.data.packing import segments
from lrattnres.evaluation.words import Words
from lrattnres.model.transformer import Transformer
from lrattnres.residual.base import State
from lrattnres.residual.coefficients import Traced
from lrattnres.residual.probe import source_name


@torch.no_grad()
def depth_reads(
    model: Transformer, tokens: Tensor, separator: int, *, documents: bool
) -> dict[int, Tensor]:
    """What each token, at each site, takes of what was written before.

    Args:
        model: The model.
        tokens: int64 [T], one window.
        separator: The token that begins a document.
        documents: Whether attention stays inside a document.

    Returns:
        Of a path that attends, α by the site t = 2..M+1, [T, sources], the sources as the plan has
        them and the mean of several heads: site 1 has one source and no choice. Of another path
        the coefficients c with h_t = Σ c_{t,i} o_i by the site t = 1..M+1, [T, t]: of the embedding,
        then of each output. Float32 on the CPU. Site t feeds sub-layer t, and site M+1 the head.
        Empty where a path neither attends nor is linear.
    """
    router = model.router
    traced: Any = None if router.attends else Traced(router.definition())
    found: dict[int, Tensor] = {}

    def observe(site: int, state: State) -> None:
        if traced is not None:
            found[site + 1] = traced.coefficients(state, site)[0].float().cpu()
            return
        weights = router.weights(state, site)
        if weights is not None:
            found[site + 1] = (weights if router.heads == 1 else weights.mean(-2))[0].cpu()

    if router.attends or router.linear:
        window = tokens.unsqueeze(0).to(model.head.weight.device)
        numbers = segments(window, separator) if documents else None
        model(window, model.mask(numbers, *window.shape), observe, traced)
    return found


def reads_record(
    model: Transformer, words: Words, tokens: Tensor, *, documents: bool
) -> dict[str, Any]:
    """`depth_reads` for JSON: tokens with their spelling; and of every site what it reads.

    A token that is part of a character is spelled by its bytes, as \\xe2. A site has its sources by
    name, and of each token a number to six decimals for each of them: α under `weights`, or
    coefficients under `coefficients`.
    """
    reads = depth_reads(model, tokens, words.prefix, documents=documents)
    path, last = model.router, len(model.sublayers)
    names = [words.spell([token]).decode("utf-8", "backslashreplace") for token in tokens.tolist()]

    def sources(site: int) -> list[str]:
        outputs = [range(output, output + 1) for output in range(site)]
        return list(map(source_name, path.sources_of(site - 1) if path.attends else outputs))

    return {
        "tokens": [
            {"token": token, "text": name}
            for token, name in zip(tokens.tolist(), names, strict=True)
        ],
        "sites": [
            {
                "site": site,
                "feeds": "head" if site > last else "attention" if site % 2 else "mlp",
                "sources": sources(site),
                "weights" if path.attends else "coefficients": [
                    [round(number, 6) for number in row] for row in numbers.tolist()
                ],
            }
            for site, numbers in reads.items()
        ],
    }
