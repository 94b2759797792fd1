"""Give a pretrained model another residual path: `python scripts/convert.py from=DIR model.residual=delta out=DIR`.

docs/using_models.md says what can be converted.
"""

from __future__ import annotations

import sys

from lrattnres.config.commands import ConvertConfig
from lrattnres.entry import leave, settings
from lrattnres.exchange.convert import convert


def run() -> bool:
    """One conversion, printed when it is done."""
    # `from` is no name for a field in Python.
    words = [
        word.replace("from=", "source=", 1) if word.startswith("from=") else word
        for word in sys.argv[1:]
    ]
    print(f"{convert(settings(ConvertConfig, words))}: converted")
    return True


if __name__ == "__main__":
    leave(run)
