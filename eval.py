"""Measure a trained run on held-out tokens: `python eval.py run=runs/NAME [diagnostics=true]`; see README.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lrattnres.config import EvalConfig, defaults, parse
from lrattnres.entry import leave, loosened
from lrattnres.evaluation.downstream import evaluate_tasks
from lrattnres.evaluation.run import evaluate_run
from lrattnres.report.run import draw_diagnostics

CONFIGS = Path(__file__).parent / "configs"
ConfigStore.instance().store(name="eval_schema", node=defaults(EvalConfig))


def run(tree: DictConfig) -> bool:
    """One evaluation, printed and written into the run folder."""
    values: Any = OmegaConf.to_container(tree, resolve=True)
    config = parse(EvalConfig, values)
    if config.downstream is not None:
        print(f"downstream tasks: {evaluate_tasks(config)}")
        return True
    evaluation = evaluate_run(config)
    if evaluation.first:
        draw_diagnostics(evaluation)
    return True


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(tree: DictConfig) -> None:
    leave(lambda: run(tree))


if __name__ == "__main__":
    sys.argv[1:] = loosened(sys.argv[1:], CONFIGS)
    main()
