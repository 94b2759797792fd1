"""The interface of a residual path, and the table of all there are.

A transformer of L blocks has M = 2L sub-layers. Sub-layer i = 1 … M writes its output o_i; o_0 is
the token embedding. A *residual path* says what each sub-layer reads of all that was written before
it: it makes h_t for the read sites t = 1 … M + 1, of which the last feeds the output head. The
model runs the loop, and cuts it at the sub-layer:

    state = path.begin(embedding)
    for site in range(M):                                 # site = t - 1
        output = sublayer(path.read(state, site))         # RMSNorm(h_t)
        state = path.write(state, site, output)
    logits = head(path.read(state, M))

A state is a NamedTuple of tensors. So one loop serves training, decoding, activation checkpointing,
shards and every look inside, and nothing of a forward pass survives in a module.

A new path is one file here that defines a class with a `residual` name, and one file
configs/path/NAME.yaml; docs/add_a_path.md writes one step by step.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lrattnres.config import ConfigError, DepthConfig, ModelConfig
from lrattnres.config.schema import parse_options
from lrattnres.kernels.backends import DepthKernels, choose_kernels
from lrattnres.kernels.reference import rms_norm

Raw = tuple[Tensor, Tensor | None]  # keys and values of an attention; see value_site
Change = Callable[[Tensor, Tensor | None], Raw]
State = Any  # a NamedTuple of tensors, or of tuples of them; each path has its own
Start = Callable[[torch.Size, torch.Generator], Tensor]
FOLDERS = "LRATTNRES_PATHS"  # environment variable: folders with files of paths, beside this one


def unchanged(key: Tensor, value: Tensor | None) -> Raw:
    """A change of keys and values that is none: for a path that only keeps them."""
    return key, value


class Read(NamedTuple):
    """What a sub-layer or the head takes: every tensor is normalised, [..., d].

    Args:
        x: the input; of attention only the queries' input, where `key` is given.
        key: what attention makes its keys of; None: of x.
        value: what attention makes its values of; None: of x.
    """

    x: Tensor
    key: Tensor | None = None
    value: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Read:
        """The same in another type."""

        parts = (part if part is None else part.to(dtype) for part in self)
        return Read(*parts)  # type: ignore[arg-type]


class Role(NamedTuple):
    """How one parameter of a residual path is treated.

    Args:
        owner: "adam" or "muon", the algorithm that updates it.
        decay: whether the published recipe decays it. This project decays only what Muon owns.
        start: its initial value: a constant, or a function (shape, generator) -> float32 tensor.
    """

    owner: str
    decay: bool
    start: float | Start


class Added(NamedTuple):
    """What a residual path costs beside the sub-layers.

    Args:
        parameters: learned numbers that the plain transformer does not have.
        mixing: multiply-adds a token of scoring, weighting and summing; a weight times a vector of
            width d is d.
        projections: multiply-adds a token of the linear maps that make keys, queries or weights.
        carried: the most values a token that a state holds while a sub-layer runs.
    """

    parameters: int
    mixing: int
    projections: int
    carried: int


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """A path without settings of its own."""


def normal(std: float) -> Start:
    """A start: independent normal numbers around zero."""
    return lambda shape, generator: torch.empty(shape).normal_(std=std, generator=generator)


class ResidualPath(nn.Module):
    """Base class of the residual paths; `config` is the whole model's.

    Attributes:
        residual: its name, `model.residual=NAME`; a class without a name is not in the table.
        Options: frozen dataclass of its own settings, `model.path.*`.
        uses: which of the settings `rank`, `blocks`, `routing`, `gate` and `depth` mean something
            to it.
        start: with its defaults, how a new model compares with its baseline: "bits" (equal
            logits), "scaled" (every read is the baseline's times a number, which the norm takes
            away but for its epsilon) or "other".
        linear: whether h is a sum of the outputs with one number each, given the weights of a
            token.
        plain: whether it is the one that the others are compared with.
        attends: whether a read is a softmax over sources, so that `weights` gives α.
        backends: names of the depth kernels that compute it (kernels/backends.py).
        emit_dim: columns that every output projection writes beyond its d.
        heads: softmaxes of one read.
    """

    residual: ClassVar[str] = ""
    Options: ClassVar[type] = NoOptions
    uses: ClassVar[frozenset[str]] = frozenset()
    start: ClassVar[str] = "other"
    plain: ClassVar[bool] = False
    attends: ClassVar[bool] = False
    backends: ClassVar[tuple[str, ...]] = ("reference",)
    linear: bool = True
    emit_dim: int = 0
    heads: int = 1

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.dim, self.eps = config, config.dim, config.norm_eps
        self.options = self.options_of(config)

    # --- what a path is: the equations ------------------------------------------------------------

    def begin(self, embedding: Tensor) -> State:
        """The state before the first sub-layer.

        Args:
            embedding: o_0, [..., d] in the model's dtype.
        """
        raise NotImplementedError

    def write(self, state: State, site: int, output: Tensor, raw: Raw | None = None) -> State:
        """The state after a sub-layer has written.

        Args:
            state: what `read` was given.
            site: which sub-layer, from 0.
            output: [..., d + emit_dim] in the model's dtype.
            raw: attention's keys and values before any norm, if `change` is a function there; of
                an MLP None.
        """
        raise NotImplementedError

    def hidden(self, state: State, site: int) -> Tensor:
        """h of a site before its norm, [..., d], in the model's dtype or in float32."""
        raise NotImplementedError

    def read(self, state: State, site: int) -> Read:
        """What sub-layer `site` takes, or the head at site M: RMSNorm(h)."""
        return Read(rms_norm(self.hidden(state, site), self.eps))

    def change(self, state: State, site: int) -> Change | None:
        """What the attention of a site makes of its raw keys and values.

        Args:
            state: what `read` was given.
            site: which sub-layer, from 0.

        Returns:
            A function of keys and values, [B, T, heads, head_dim] each (values are None where
            `value_site` is another sub-layer), to those that it attends with. It holds tensors and
            no numbers that differ between sites, so that compiled sub-layers share their code.
            None: they stay as they are, and `write` is not given them.
        """
        return None

    def weights(self, state: State, site: int) -> Tensor | None:
        """α of a read, float32 [..., sources], [..., heads, sources] for several heads; None where
        nothing attends.
        """
        return None

    def sources_of(self, site: int) -> tuple[range, ...]:
        """What `weights` weighs at a site: the outputs that each source sums, counted from 1; the
        embedding is range(1).
        """
        return ()

    # --- what the rest of the package asks of it --------------------------------------------------

    @classmethod
    def variant(cls, config: ModelConfig) -> type[ResidualPath]:
        """The class for these settings: itself, or one with ablations."""
        return cls

    @classmethod
    def build(cls, config: ModelConfig, kernels: DepthKernels) -> ResidualPath:
        """The path of a model; `kernels` compute its reads, if they are such as kernels compute."""
        return cls(config)

    def definition(self) -> ResidualPath:
        """The same path with the same parameters, reading a site at a time in plain torch."""
        return self

    def decodes(self, *, together: bool) -> None:
        """Prepares for decoding token by token; `together`: reads that can be done at once are."""

    @classmethod
    def options_of(cls, config: ModelConfig) -> Any:
        """`model.path` as the path's own Options.

        Raises:
            ConfigError: with every unknown key, wrong type and value out of bounds.
        """
        return parse_options(cls.Options, config.path, "model.path")

    @classmethod
    def begins(cls, config: ModelConfig) -> str:
        """`start` of a model with these settings."""
        return cls.start

    @classmethod
    def value_site(cls, config: ModelConfig, site: int) -> int:
        """The sub-layer whose values the attention of sub-layer `site` uses: its own, or an earlier
        one's. Then it has no projection of its own for them, and decoding keeps them once.
        """
        return site

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        """How each parameter is treated, by its name in the path with `*` for every index."""
        return {}

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        """What the path adds to the plain transformer."""
        raise NotImplementedError

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        """A line for each setting, or combination of them, that cannot be: what, why, and what to
        write.
        """
        try:
            cls.options_of(config)
        except ConfigError as error:
            yield from error.errors

    @classmethod
    def settled(cls, config: ModelConfig) -> tuple[ModelConfig, list[str]]:
        """The settings as they are recorded, and a line for each that has no meaning for this path
        and is dropped.

        So one command can sweep over paths that have different settings.
        """
        meaning = f"has no meaning for model.residual={config.residual}: recorded as"
        gone: dict[str, Any] = {"path": recorded(cls.options_of(config))}
        notes = []
        for name, nothing in {"rank": None, "blocks": None, "routing": None, "gate": False}.items():
            if name not in cls.uses and getattr(config, name) is not nothing:
                gone[name] = nothing
                notes.append(
                    f"model.{name} {meaning} {'null' if nothing is None else str(nothing).lower()}"
                )
        if "depth" not in cls.uses:
            gone["depth"] = DepthConfig()
            notes += [
                f"{setting} has no meaning for model.residual={config.residual}: "
                "recorded as the default"
                for setting in changed(config.depth).values()
            ]
        return dataclasses.replace(config, **gone), notes

    @classmethod
    def choose_kernels(
        cls,
        config: ModelConfig,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        compiled: bool,
    ) -> DepthKernels:
        """The backend for a model with this path; arguments of `kernels.backends.choose_kernels`.

        Raises:
            ValueError: The one that is named has no code for the path, does not compute its
                settings, or cannot run here.
        """
        beyond = cls.beyond_kernels(config)
        return choose_kernels(
            name, device, dtype, compiled=compiled, beyond=beyond, known=cls.backends
        )

    @classmethod
    def beyond_kernels(cls, config: ModelConfig) -> list[str]:
        """Settings, as key=value, that only plain torch computes."""
        return []

    @classmethod
    def other_routing(cls, routing: str | None) -> str | None:
        """`model.routing` by name, if it is not the published one."""
        return None

    @classmethod
    def label(cls, config: ModelConfig) -> list[str]:
        """Its settings as parts of a run's name, such as [N4, r64]."""
        return []

    @classmethod
    def description(cls, config: ModelConfig) -> str:
        """The path and its settings in words."""
        options = recorded(cls.options_of(config))
        return ", ".join([config.residual, *(f"{name}={value}" for name, value in options.items())])


def recorded(options: Any) -> dict[str, Any]:
    """A path's Options as plain values, choices by name: what is written to a run folder."""
    return {
        name: value.name if isinstance(value, Enum) else value
        for name, value in vars(options).items()
    }


def changed(depth: DepthConfig) -> dict[str, str]:
    """The ablations that differ from the published method: name -> `model.depth.name=value`."""
    published = vars(DepthConfig())

    def written(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else getattr(value, "name", str(value))

    return {
        name: f"model.depth.{name}={written(value)}"
        for name, value in vars(depth).items()
        if value != published[name]
    }


def pattern_of(name: str) -> str:
    """A parameter's name with every index replaced by `*`: mixers.7.alpha -> mixers.*.alpha."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


@cache
def paths() -> dict[str, type[ResidualPath]]:
    """The table of residual paths, by name: all that is defined in this folder, and in those that
    the environment names.

    Raises:
        ConfigError: if two classes have one name.
    """
    found: dict[str, type[ResidualPath]] = {}
    for module in _modules():
        for kind in vars(module).values():
            own = isinstance(kind, type) and issubclass(kind, ResidualPath)
            if own and kind.residual and kind.__module__ == module.__name__:
                if kind.residual in found:
                    first = sys.modules[found[kind.residual].__module__]
                    both = f"{first.__file__} and {module.__file__}"
                    raise ConfigError([f"model.residual={kind.residual}: defined in {both}"])
                found[kind.residual] = kind
    return dict(sorted(found.items()))


def _modules() -> Iterator[ModuleType]:
    import lrattnres.residual as package

    for entry in pkgutil.iter_modules(package.__path__):
        if not entry.ispkg:
            yield importlib.import_module(f"{package.__name__}.{entry.name}")
    for number, folder in enumerate(filter(None, os.environ.get(FOLDERS, "").split(os.pathsep))):
        if not Path(folder).is_dir():
            raise ConfigError(
                [f"{FOLDERS}={folder}: no such folder; write folders with files of residual paths"]
            )
        for file in sorted(Path(folder).glob("[!_]*.py")):
            name = f"{FOLDERS.lower()}.{number}.{file.stem}"
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # where dataclasses, torch.compile and pickle look for it
            spec.loader.exec_module(module)
            yield module


def path_of(config: ModelConfig) -> type[ResidualPath]:
    """The class of a model's residual path, ablations included.

    Raises:
        ConfigError: It is not in the table.
    """
    if (found := paths().get(config.residual)) is None:
        raise ConfigError(
            [
                f"model.residual={config.residual}: no such residual path here; if it has a file "
                f"of its own, name its folder in the environment, {FOLDERS}=FOLDER"
            ]
        )
    return found.variant(config)
