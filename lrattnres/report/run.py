"""The pictures that training and evaluation leave in a run folder.

What draws them is imported where there is something to draw: it takes a second, and a command that
is refused draws nothing.
"""

from __future__ import annotations

from lrattnres.evaluation.run import Evaluation
from lrattnres.runs.folder import RunFolder
from lrattnres.runs.metrics import MetricsFile


def draw_training(folder: RunFolder) -> None:
    """Draws plots/loss.png from metrics.jsonl."""
    from lrattnres.report.plots import loss_curve

    path = folder.plots_path / "loss.png"
    loss_curve(MetricsFile.read(folder.metrics_path), folder.path.name, path)
    print(f"loss curve: {path}")


def draw_diagnostics(evaluation: Evaluation) -> None:
    """Draws the pictures of read sites, if they were measured.

    plots/depth.png has α where a path attends, plots/coefficients.png what each site takes from
    each output, and plots/sites.png a curve over sites for each of the other numbers.
    """
    diagnostics, folder = evaluation.diagnostics, evaluation.folder
    if diagnostics is None:
        return
    from lrattnres.report.plots import coefficient_heatmap, depth_heatmap, site_curves

    title = f"{folder.path.name}, step {evaluation.step}"
    if any(diagnostics["mean_weight"]):
        depth_heatmap(diagnostics, title, folder.plots_path / "depth.png")
        print(f"depth attention: {folder.plots_path / 'depth.png'}")
    if coefficients := diagnostics.get("coefficients"):
        coefficient_heatmap(coefficients, title, folder.plots_path / "coefficients.png")
        print(f"what each site takes from each output: {folder.plots_path / 'coefficients.png'}")
    else:
        print("no coefficients: what a site reads is no sum of the outputs with one number each")
    site_curves(diagnostics, title, folder.plots_path / "sites.png")
    print(f"read sites: {folder.plots_path / 'sites.png'}")
