"""Run folders and W&B exports of a tiny model with chosen figures, by no writer of its own."""

import json
from pathlib import Path
from typing import Any

LAYERS, DIM, WIDTH, STEPS = 2, 64, 176, 4  # 16/1024 of this width is a rank of 1
SITES = 2 * LAYERS + 1

CONFIG: dict[str, Any] = {
    "name": "x", "runs": "/elsewhere", "seed": 0, "steps": STEPS, "global_batch": 2,
    "micro_batch": 2, "device": "cpu", "precision": "float32", "z_loss": 1e-5,
    "model": {
        "residual": "baseline", "rank": None, "blocks": None, "layers": LAYERS, "dim": DIM,
        "heads": 4, "mlp_width": WIDTH, "context": 16, "vocabulary": 257,
    },
    "data": {"corpus": "files", "root": "/home/somebody/texts", "holdout": 0.05},
    "tokenizer": {"name": "bytes"},
    "optimizer": {
        "muon_lr": 0.01, "adam_lr": 0.003, "warmup": 1, "momentum_rise": 0, "momentum_fall": 0,
    },
    "checkpoint": {"every": 2}, "evaluation": {"every": 2, "tokens": 64},
}  # fmt: skip


def config(changes: dict[str, Any]) -> dict[str, Any]:
    """CONFIG with other values under dotted keys."""
    tree = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        *path, last = key.split(".")
        branch = tree
        for name in path:
            branch = branch.setdefault(name, {})
        branch[last] = value
    return tree


def records(
    val_loss: float | None, losses: list[float] | None = None, norms: list[Any] | None = None
) -> list[dict[str, Any]]:
    losses, norms = losses or [4.0, 3.0, 2.5, 2.25], norms or [2.0, 1.0, 0.5, 0.5]
    lines = [
        {
            "step": step,
            "tokens": 32 * step,
            "loss": loss,
            "grad_norm": norm,
            "tokens_per_second": 100.0 * step,
            "mfu": 0.5,
        }
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1)
    ]
    return lines[:2] if val_loss is None else [*lines[:-1], lines[-1] | {"val_loss": val_loss}]


def diagnostics(peak: float) -> dict[str, Any]:
    """Of full routing: site t has t sources; all but site 1 give `peak` - t/100 to the newest."""
    sources = [["embedding", *map(str, range(1, site))] for site in range(1, SITES + 1)]
    values = [None, *(peak - site / 100 for site in range(2, SITES + 1))]
    means = [
        None if top is None else [*[(1 - top) / site] * site, top]
        for site, top in enumerate(values)
    ]
    return {
        "tokens": 8,
        "sources": sources,
        "mean_weight": means,
        "largest_weight": values,
        "effective_sources": values,
    }


def coefficients(value: float) -> dict[str, Any]:
    """Of a path that does not attend: each site takes `value` of what was written last."""
    rows = [[*[1.0] * site, value] for site in range(SITES)]
    nothing = [None] * SITES
    return {
        "tokens": 8,
        "sources": [[] for _ in rows],
        "mean_weight": nothing,
        "largest_weight": nothing,
        "effective_sources": nothing,
        "coefficients": rows,
    }


def measured(folder: Path, found: dict[str, Any]) -> None:
    """Leaves diagnostics of the last step in a run folder, as eval.py does."""
    (folder / "evaluation").mkdir()
    file = folder / "evaluation" / f"step_{STEPS:06d}.diagnostics.json"
    file.write_text(json.dumps(found))


def run_folder(
    folder: Path,
    val_loss: float | None = 2.0,
    *,
    corpus: str = "abc",
    lines: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> Path:
    """As training leaves it; `changes` are settings with `__` for a dot.

    val_loss=None: stopped after step 2.
    """
    folder.mkdir(parents=True)
    tree = config({key.replace("__", "."): value for key, value in changes.items()})
    # YAML that is JSON too, but for numbers without a point in front of their exponent
    (folder / "config.yaml").write_text(json.dumps(tree).replace("1e-05", "1.0e-05") + "\n...\n")
    lines = records(val_loss) if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "identity.json").write_text(json.dumps({"corpus": corpus, "tokenizer": "bytes"}))
    (folder / "environment.json").write_text(
        json.dumps({"starts": [{"device": "cpu, 1 threads", "ranks": "1"}]})
    )
    if val_loss is not None:
        (folder / "summary.json").write_text(
            json.dumps({"step": tree["steps"], "val_loss": val_loss})
        )
    return folder


def routed(residual: str, rank: int | None = None, blocks: int | None = None) -> dict[str, Any]:
    return {"model__residual": residual, "model__rank": rank, "model__blocks": blocks}
