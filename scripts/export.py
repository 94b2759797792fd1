"""Write a trained model as a folder of its own: `python scripts/export.py run=runs/NAME out=DIR`; see docs/using_models.md."""

from __future__ import annotations

import sys

from lrattnres.config.commands import ExportConfig
from lrattnres.entry import leave, settings
from lrattnres.exchange.export import export_run
from lrattnres.exchange.folder import read_exported


def run() -> bool:
    """One export, printed when it is done."""
    exported = read_exported(export_run(settings(ExportConfig, sys.argv[1:])))
    print(f"{exported.path}: exported, the model of step {exported.step}")
    return True


if __name__ == "__main__":
    leave(run)
