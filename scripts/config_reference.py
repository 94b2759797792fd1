"""Write the reference of all settings from the schema: `python scripts/config_reference.py docs/config.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import MISSING

from lrattnres.config import (
    EvalConfig,
    TokenizeConfig,
    TrainConfig,
    defaults,
    expected,
    fields_of,
    flatten,
)
from lrattnres.config.commands import ConvertConfig, ExportConfig, GenerateConfig, InspectConfig


def table(schema: type) -> str:
    """One row a setting: its key, what it may be, its default where the schema has one, and what it means."""
    values = flatten(defaults(schema))
    rows = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for key, (kind, metadata) in fields_of(schema).items():
        value = values[key]
        shown = (
            ""
            if value in (MISSING, {})
            else "null"
            if value is None
            else str(value).lower()
            if isinstance(value, bool)
            else value
        )
        mark = " *" if metadata["may_change"] else ""
        rows.append(f"| `{key}`{mark} | {expected(kind)} | {shown} | {metadata['help']} |")
    return "\n".join(rows)


def reference() -> str:
    """The whole page."""
    return f"""# Settings

Written by `make docs` from `lrattnres/config.py`. A setting without a default here has its value in `configs/`, by the
chosen model, data, tokenizer, optimizer and experiment; `python train.py --cfg job` prints what would run. Those
marked * may change when a run is continued; with any other change the run folder is refused.

## train.py

{table(TrainConfig)}

## eval.py

{table(EvalConfig)}

## scripts/tokenize_corpus.py

{table(TokenizeConfig)}

## scripts/generate.py

{table(GenerateConfig)}

## scripts/inspect_text.py

{table(InspectConfig)}

## scripts/export.py

{table(ExportConfig)}

## scripts/convert.py

`from=DIR` is the same as `source=DIR`.

{table(ConvertConfig)}
"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
