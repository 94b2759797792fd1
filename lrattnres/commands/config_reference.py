"""Write the reference of all settings from the schema.

lrattnres config_reference [docs/config.md]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from lrattnres.commands.cost import CostConfig
from lrattnres.commands.estimate import EstimateConfig
from lrattnres.commands.report import ReportConfig
from lrattnres.commands.running import command
from lrattnres.commands.sweep_status import StatusConfig
from lrattnres.commands.table1 import GridConfig
from lrattnres.config import (
    EvalConfig,
    TokenizeConfig,
    TrainConfig,
    defaults,
    expected,
    fields_of,
    flatten,
    option,
)
from lrattnres.config.commands import ConvertConfig, ExportConfig, GenerateConfig, InspectConfig
from lrattnres.config.schema import span


@dataclass
class ReferenceConfig:
    out: str | None = option("file that is written; `out=` may be left out; null: print it", None)


COMPOSED = {"train": TrainConfig, "eval": EvalConfig, "tokenize": TokenizeConfig}
OWN = {
    "generate": GenerateConfig,
    "inspect": InspectConfig,
    "export": ExportConfig,
    "convert": ConvertConfig,
    "report": ReportConfig,
    "sweep_status": StatusConfig,
    "config_reference": ReferenceConfig,
}
BESIDE_TRAINING = {"cost": CostConfig, "estimate": EstimateConfig, "table1": GridConfig}
NOTES = {"convert": "`from=DIR` is the same as `source=DIR`."} | dict.fromkeys(
    BESIDE_TRAINING, "Besides, every setting of `lrattnres train`."
)
HEAD = """# Settings

Written by `make docs` from `lrattnres/config/`. A setting without a default here has its value in
`configs/`, by the chosen model, data, tokenizer, optimizer and experiment;
`lrattnres train --cfg job` prints what would run. Those marked * may change when a run is
continued; with any other change the run folder is refused.

In a clone `lrattnres train` is `python train.py`, `lrattnres eval` is `python eval.py`, and the
other commands are the files of `scripts/`.
"""


def shown(value: object) -> str:
    """A default as it would be written on the command line."""
    if value in (MISSING, {}):
        return ""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def table(schema: type) -> str:
    """One row a setting: key, what it may be, its default where the schema has one, meaning."""
    values = flatten(defaults(schema))
    rows = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for key, (kind, metadata) in fields_of(schema).items():
        mark = " *" if metadata["may_change"] else ""
        bounds = span(metadata["limits"])
        allowed = ", ".join([expected(kind), *([bounds] if bounds else [])])
        rows.append(f"| `{key}`{mark} | {allowed} | {shown(values[key])} | {metadata['help']} |")
    return "\n".join(rows)


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, schema in (COMPOSED | OWN | BESIDE_TRAINING).items():
        note = f"{NOTES[name]}\n\n" if name in NOTES else ""
        parts.append(f"## lrattnres {name}\n\n{note}{table(schema)}\n")
    return "\n".join(parts)


def run(config: ReferenceConfig) -> None:
    """The page, written or printed."""
    if config.out is None:
        print(reference(), end="")
    else:
        Path(config.out).write_text(reference(), encoding="utf-8")


def main() -> None:
    command(__doc__, ReferenceConfig, run, positional="out")
