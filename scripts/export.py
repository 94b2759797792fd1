"""Write a trained model as a folder of its own: `python scripts/export.py run=runs/NAME out=DIR`; see docs/using_models.md."""

from __future__ import annotations

import sys

from lrattnres.entry import leave, settings
from lrattnres.exchange.config import ExportConfig
from lrattnres.exchange.export import export_run


def run() -> bool:
    """One export, printed when it is done."""
    print(f"{export_run(settings(ExportConfig, sys.argv[1:]))}: exported")
    return True


if __name__ == "__main__":
    leave(run)
