"""Residual paths of transformers: train, use and compare them.

`depth_attention` is the operator for models of your own; `load` opens an exported model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrattnres.kernels.backends import depth_attention as depth_attention
    from lrattnres.model.transformer import Transformer


def load(folder: str, **choices: Any) -> Transformer:
    """The model of an exported or converted folder; see `lrattnres.exchange.folder.load_model`."""
    # Imported here: the operator alone needs torch and nothing else.
    from lrattnres.exchange.folder import load_model

    return load_model(folder, **choices)


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: `lrattnres --help` need not wait for torch.
    if name != "depth_attention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lrattnres.kernels.backends import depth_attention

    return depth_attention
