"""Write a trained model as a folder of its own.

    lrattnres export run=runs/NAME out=DIR

docs/using_models.md tells more.
"""

from __future__ import annotations

from lrattnres.commands.running import command
from lrattnres.config.commands import ExportConfig
from lrattnres.exchange.export import export_run
from lrattnres.exchange.folder import read_exported


def run(config: ExportConfig) -> None:
    """One export, printed when it is done."""
    exported = read_exported(export_run(config))
    print(f"{exported.path}: exported, the model of step {exported.step}")


def main() -> None:
    command(__doc__, ExportConfig, run)
