from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lrattnres.kernels.backends import depth_attention as depth_attention

if TYPE_CHECKING:
    from lrattnres.model.transformer import Transformer


def load(folder: str, **choices: Any) -> Transformer:
    """The model of an exported or converted folder; see `lrattnres.exchange.folder.load_model`."""
    # Imported here: the operator alone needs torch and nothing else.
    from lrattnres.exchange.folder import load_model

    return load_model(folder, **choices)
