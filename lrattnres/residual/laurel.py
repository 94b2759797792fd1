"""LAuReL: the residual stream with learned weights, and with a low-rank map of what it has been.

Menghani, Kumar, Kumar, "LAuReL: Learned Augmented Residual Layer" (arXiv 2411.07501, equations
2 to 6 and footnote 2). With x_1 = o_0 and h_t = x_t, `parts` says which terms there are;
sub-layer t = 1 … M computes

    x_{t+1} = a_t o_t + c_t (x_t + P_t Q_t y_t),   Q_t [r, d], P_t [d, r]
    rw:  (a_t, c_t) = 2·softmax(w_t);  without it a = c = 1
    lr:  y_t = x_t        pa:  y_t = Σ_{j < min(back, t)} γ_{t,j} x_{t−j};  else no low-rank map

r is `model.rank`, 32 if it is null, as in the paper's language model of 24 layers.

Start: w and P are zero, γ is 1/back, and row i mod r of Q has 1/√(rd) in column i and zeros
else ("column orthogonal"). So a model begins as its baseline, to the last bit, whatever its
parts.

Where the paper leaves it open: the map that bounds a and c ("softmax or sigmoid") is the
public one of Hyper-Connection Factory, which keeps a = c = 1 at the start. rw with lr
multiplies the whole skip by c (equation 5). pa has one low-rank map for all past streams (2rd
+ k parameters, section 2.3) and not one each (Table 4). The published equation 6 of rw with pa
drops x itself: taken as a misprint. Weight decay is not published: none.

Costs 2M parameters and 2Md multiply-adds a token for rw, 2Mrd and 2Mrd for lr, and for pa
beyond those of lr M·back and d·Σ_t min(back, t). A state holds one vector of width d, for pa
the last `back` ones.

With lr or pa an output has no one coefficient: what `hidden` gives in further columns leaves
the low-rank map out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import weighted_sum, wide
from lrattnres.residual.base import Added, ResidualPath, Role

PARTS = ("rw", "lr", "pa", "rw+lr", "rw+pa")
RANK = 32


class State(NamedTuple):
    streams: tuple[Tensor, ...]  # x_t, x_{t−1}, …: as many as are read again


class Laurel(ResidualPath):
    residual, start = "laurel", "bits"
    uses = frozenset({"rank"})

    @dataclass(frozen=True)
    class Options:
        parts: str = option(f"what is learned: {', '.join(PARTS)}", "rw+lr")
        back: int = option("pa: streams that the low-rank map reads", 3, at_least=1, at_most=10_000)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        sites, rank = 2 * config.layers, self.rank_of(config)
        self.parts = self.options.parts.split("+")
        self.linear = rank is None
        if "rw" in self.parts:
            self.mix = nn.Parameter(torch.zeros(sites, 2))
        if rank is not None:
            self.down = nn.Parameter(torch.zeros(sites, rank, self.dim))
            self.up = nn.Parameter(torch.zeros(sites, self.dim, rank))
        if "pa" in self.parts:
            self.past = nn.Parameter(torch.zeros(sites, self.options.back))

    def begin(self, embedding: Tensor) -> State:
        return State((embedding,))

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        skip, own = wide(state.streams[0]), wide(output)
        if not self.linear:
            low = self.low(state, site)
            skip = skip + F.pad(wide(low), (0, output.shape[-1] - low.shape[-1]))
        if "rw" in self.parts:
            a, c = 2 * torch.softmax(wide(self.mix[site]), dim=-1)
            skip, own = c * skip, a * own
        kept = self.options.back - 1 if "pa" in self.parts else 0
        return State(((skip + own).to(output.dtype), *state.streams[:kept]))

    def low(self, state: State, site: int) -> Tensor:
        """P Q y, [..., d]."""
        streams = [stream[..., : self.dim] for stream in state.streams]
        y = streams[0]
        if "pa" in self.parts:
            y = weighted_sum(self.past[site, : len(streams)], streams).to(y.dtype)
        return F.linear(F.linear(y, self.down[site].to(y.dtype)), self.up[site].to(y.dtype))

    def hidden(self, state: State, site: int) -> Tensor:
        return state.streams[0]

    @classmethod
    def rank_of(cls, config: ModelConfig) -> int | None:
        """r; None without a low-rank map."""
        return None if cls.options_of(config).parts == "rw" else config.rank or RANK

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        def orthogonal(shape: torch.Size, generator: torch.Generator) -> Tensor:
            rank, dim = shape[-2:]
            columns = torch.arange(dim)
            rows = torch.zeros(rank, dim)
            rows[columns % rank, columns] = (rank * dim) ** -0.5
            return rows.expand(shape)

        options, roles = cls.options_of(config), {}
        if "rw" in options.parts:
            roles["mix"] = Role("adam", False, 0.0)
        if cls.rank_of(config) is not None:
            roles |= {"down": Role("adam", False, orthogonal), "up": Role("adam", False, 0.0)}
        if "pa" in options.parts:
            roles["past"] = Role("adam", False, 1 / options.back)
        return roles

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        options, dim, sites = cls.options_of(config), config.dim, 2 * config.layers
        mixed, maps = (
            2 * sites * ("rw" in options.parts),
            2 * sites * dim * (cls.rank_of(config) or 0),
        )
        back = options.back if "pa" in options.parts else 0
        past = sum(min(back, t) for t in range(1, sites + 1))
        return Added(
            parameters=mixed + maps + sites * back,
            mixing=(mixed + past) * dim,
            projections=maps,
            carried=max(1, min(back, sites)) * dim,
        )

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        yield from (found := list(super().errors(config)))
        if found:
            return
        options, sites = cls.options_of(config), 2 * config.layers
        if options.parts not in PARTS:
            known = ", ".join(PARTS)
            yield f"model.path.parts={options.parts}: no such parts; write one of {known}"
        elif "pa" in options.parts and options.back > sites:
            yield (
                f"model.path.back={options.back}: no sub-layer has so many streams before it; "
                f"write 1 to 2*model.layers={sites}"
            )
        elif not 1 <= (cls.rank_of(config) or 1) <= config.dim:
            yield f"model.rank={cls.rank_of(config)}: must be between 1 and model.dim={config.dim}"

    @classmethod
    def settled(cls, config: ModelConfig) -> tuple[ModelConfig, list[str]]:
        config, notes = super().settled(config)
        rank, back = cls.rank_of(config), cls.Options().back
        parts = f"model.path.parts={config.path['parts']}"
        if rank is None and config.rank is not None:
            notes.append(f"model.rank has no meaning for {parts}: recorded as null")
        if rank is not None and config.rank is None:
            notes.append(
                f"model.rank=null: recorded as {rank}, the default of model.residual=laurel"
            )
        if "pa" not in config.path["parts"] and config.path["back"] != back:
            notes.append(f"model.path.back has no meaning for {parts}: recorded as the default")
            config = replace(config, path=config.path | {"back": back})
        return replace(config, rank=rank), notes

    @classmethod
    def label(cls, config: ModelConfig) -> list[str]:
        return [cls.options_of(config).parts, *([f"r{config.rank}"] if config.rank else [])]
