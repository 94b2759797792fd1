"""The pictures that training and evaluation leave in a run folder."""

from __future__ import annotations

from lrattnres.evaluation.run import Evaluation
from lrattnres.report.plots import depth_heatmap, loss_curve, site_curves
from lrattnres.runs.folder import RunFolder
from lrattnres.runs.metrics import MetricsFile


def draw_training(folder: RunFolder) -> None:
    """plots/loss.png from metrics.jsonl."""
    path = folder.plots_path / "loss.png"
    loss_curve(MetricsFile.read(folder.metrics_path), folder.path.name, path)
    print(f"loss curve: {path}")


def draw_diagnostics(evaluation: Evaluation) -> None:
    """plots/depth.png and plots/sites.png, if depth was measured; a heat map only where something routes."""
    diagnostics, folder = evaluation.diagnostics, evaluation.folder
    if diagnostics is None:
        return
    title = f"{folder.path.name}, step {evaluation.step}"
    if any(diagnostics["mean_weight"]):
        depth_heatmap(diagnostics, title, folder.plots_path / "depth.png")
        print(f"depth attention: {folder.plots_path / 'depth.png'}")
    site_curves(diagnostics, title, folder.plots_path / "sites.png")
    print(f"read sites: {folder.plots_path / 'sites.png'}")
