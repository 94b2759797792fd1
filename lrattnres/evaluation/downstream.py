"""Downstream tasks by lm-evaluation-harness, without examples in the prompt, as in the papers."""

from __future__ import annotations

import difflib
import importlib.util
import json
from pathlib import Path
from typing import Any

from lrattnres.config import ConfigError, EvalConfig
from lrattnres.data.errors import DataError
from lrattnres.distributed.ranks import placement
from lrattnres.evaluation.load import device_errors, load_run
from lrattnres.evaluation.run import results_folder
from lrattnres.exchange.folder import GENERATION, Exported, read_json
from lrattnres.runs.checkpoint import Checkpoint
from lrattnres.runs.files import from_json, to_json, write_atomic

BATCH = 16
RESAMPLES = 1000  # for the standard errors of what is no mean
CHOSEN = ("device", "precision", "attention", "depth_kernels")
# Settings of generation_config.json that change what greedy decoding writes, with the values under
# which they do not. None is neutral for all of them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1.0,),
    "penalty_alpha": (),
    "bad_words_ids": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([],),
}


def evaluate_tasks(config: EvalConfig) -> Path:
    """Measures the tasks of `config.downstream`, prints a table and writes it all as JSON.

    Returns:
        The file that was written.

    Raises:
        ConfigError: The settings cannot be.
        DataError: The data of a task cannot be had, or a task asks for what is not had here.
        RunError, CheckpointError, FolderError: The model cannot be loaded; see `load_run`.
    """
    _check(config)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from lrattnres.evaluation.harness import HarnessModel

    assert config.downstream is not None
    # The harness's own index is thousands of files, and not needed where all tasks are one's own.
    manager = TaskManager(include_path=config.tasks, include_defaults=False)
    if not set(config.downstream) <= set(manager.all_tasks):
        manager = TaskManager(include_path=config.tasks)
    check_names(config.downstream, manager.all_tasks)
    loaded = load_run(config, print)
    choices, words = loaded.choices(), loaded.words
    where = results_folder(loaded.folder.path / "evaluation")
    chosen = ", ".join(choices[name] for name in CHOSEN)
    print(f"{loaded.source.path}: {chosen}; {len(config.downstream)} tasks, tokenizer {words.name}")
    harness = HarnessModel(loaded.model, words, config.batch or BATCH, unlike_greedy(loaded.source))
    try:
        results = simple_evaluate(
            harness,
            tasks=list(config.downstream),
            num_fewshot=0,
            limit=config.limit,
            task_manager=manager,
            bootstrap_iters=RESAMPLES,
            log_samples=False,
        )
    except (OSError, ConnectionError) as error:
        raise DataError(
            f"downstream={config.downstream}: the data of a task cannot be had: {error}"
        ) from error
    file = where / f"step_{loaded.source.step:06d}.downstream.json"
    assert results is not None
    kept = {
        name: results[name]
        for name in ("results", "versions", "n-shot", "n-samples")
        if name in results
    }
    kept["measured"] = {task: choices | {"limit": config.limit} for task in results["results"]}
    before = from_json(file.read_bytes()) if file.exists() else {}  # other tasks keep their results
    kept = {name: before.get(name, {}) | values for name, values in kept.items()}
    write_atomic(file, to_json(json.loads(json.dumps(kept, default=str)), indent=2) + "\n")
    print("\n".join(_table(results["results"])))
    return file


def _check(config: EvalConfig) -> None:
    unused = {"tokens": None, "diagnostics": False, "diagnostics_tokens": None, "cache": None}
    errors = [
        f"{name}={getattr(config, name)}: has no use with downstream=[…]; leave it out"
        for name, value in unused.items()
        if getattr(config, name) != value
    ]
    errors += device_errors(config)
    if not config.downstream:
        errors.append(
            "downstream=[]: names no task; write downstream=[hellaswag,piqa], or leave it out"
        )
    for name in ("batch", "limit"):
        value = getattr(config, name)
        if value is not None and value < 1:
            errors.append(f"{name}={value}: must be at least 1")
    if config.tasks is not None and not Path(config.tasks).is_dir():
        errors.append(f"tasks={config.tasks}: no such folder; write the folder of your task files")
    if placement()[1] > 1:
        errors.append("downstream=[…]: one process measures tasks; start it without torchrun")
    if importlib.util.find_spec("lm_eval") is None:
        errors.append(
            "downstream=[…]: the package lm_eval is not installed; `pip install lrattnres[eval]`"
        )
    if errors:
        raise ConfigError(errors)


def unlike_greedy(source: Checkpoint | Exported) -> list[str]:
    """What generation_config.json of a converted model says and greedy decoding here does not do.

    Returns:
        Each setting with its file, as key=value.
    """
    if not isinstance(source, Exported) or source.tokenizer is not None:
        return []
    said = read_json(source.path / GENERATION)
    return [
        f"{source.path / GENERATION}: {name}={said[name]!r}"
        for name, values in NEUTRAL.items()
        if said.get(name) is not None and said[name] not in values
    ]


def check_names(wanted: list[str], known: list[str]) -> None:
    """Raises ConfigError with every task that is not known, and what may have been meant."""
    errors = []
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            errors.append(
                f"downstream: {name} is no task of the harness, nor of tasks=FOLDER{hint}"
            )
    if errors:
        raise ConfigError(errors)


def _table(results: dict[str, dict[str, Any]]) -> list[str]:
    """One line a task and metric, whose name ends with the harness's filter if it has one."""
    lines = []
    for task, values in results.items():
        for key, value in values.items():
            name, _, rest = key.partition(",")
            if name.endswith("_stderr") or not isinstance(value, float):
                continue
            error = values.get(f"{name}_stderr,{rest}")
            spread = f" ± {error:.4f}" if isinstance(error, float) else ""
            lines.append(
                f"{task:<24}{name if rest in ('none', '') else key:<24}{value:.4f}{spread}"
            )
    return lines
