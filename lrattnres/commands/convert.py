"""Give a pretrained model another residual path.

    lrattnres convert from=DIR model.residual=delta out=DIR

docs/using_models.md says what can be converted. `from=DIR` is the same as `source=DIR`.
"""

from __future__ import annotations

import re
import sys

from lrattnres.commands.running import command
from lrattnres.config.commands import ConvertConfig
from lrattnres.exchange.convert import convert


def run(config: ConvertConfig) -> None:
    """One conversion, printed when it is done."""
    print(f"{convert(config)}: converted")


def main() -> None:
    # `from` is no name for a field in Python.
    words = [re.sub("^from=", "source=", word) for word in sys.argv[1:]]
    command(__doc__, ConvertConfig, run, words=words)
