"""Measure a trained run on held-out tokens, or by tasks.

    lrattnres eval run=runs/NAME [diagnostics=true]

README.md and docs/using_models.md tell more.
"""

from __future__ import annotations

from omegaconf import DictConfig

from lrattnres.commands.composing import start
from lrattnres.config import EvalConfig, parse
from lrattnres.config.checks import checked
from lrattnres.entry import leave, plain_settings
from lrattnres.evaluation.downstream import evaluate_tasks
from lrattnres.evaluation.run import evaluate_run
from lrattnres.report.run import draw_diagnostics


def run(tree: DictConfig) -> bool:
    """One evaluation, printed and written into the run folder."""
    config = checked(parse(EvalConfig, plain_settings(tree)))
    if config.downstream is not None:
        print(f"downstream tasks: {evaluate_tasks(config)}")
        return True
    evaluation = evaluate_run(config)
    if evaluation.first:
        draw_diagnostics(evaluation)
    return True


def task(tree: DictConfig) -> None:
    leave(lambda: run(tree))


def main() -> None:
    start("eval", EvalConfig, task)
