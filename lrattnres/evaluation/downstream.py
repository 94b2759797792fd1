"""Downstream tasks by lm-evaluation-harness, without examples in the prompt, as in the papers."""

from __future__ import annotations

import difflib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lrattnres.config import ConfigError, EvalConfig, Precision, TokenizerName
from lrattnres.data.errors import DataError
from lrattnres.data.tokenizers import Tokenizer, build_tokenizer
from lrattnres.distributed.ranks import placement
from lrattnres.evaluation.run import device_faults, find_weights, load_weights, run_of, tokenizer_of
from lrattnres.exchange.folder import CONFIG, Exported, FolderError
from lrattnres.runs.files import from_json, to_json, write_atomic

BATCH = 16
RESAMPLES = 1000  # for the standard errors of what is no mean


@dataclass(frozen=True)
class Trained:
    """The tokenizer that a model was trained with here: the separator opens every text, and ends one that is written."""

    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return self.tokenizer.name

    @property
    def opening(self) -> list[int]:
        return [self.tokenizer.separator]

    @property
    def prefix(self) -> int:
        return self.tokenizer.separator

    @property
    def ends(self) -> frozenset[int]:
        return frozenset(self.opening)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)


class Pretrained:
    """The tokenizer.json of a converted model; a text opens with whatever that tokenizer itself puts there."""

    def __init__(self, exported: Exported):
        from tokenizers import Tokenizer as Fast

        file = exported.path / "tokenizer.json"
        if not file.exists():
            raise FolderError(
                f"{file}: not there; copy the tokenizer of the pretrained model into the folder"
            )
        end = from_json((exported.path / CONFIG).read_bytes())["eos_token_id"]
        if exported.separator is None:
            raise FolderError(
                f"{exported.path / CONFIG}: bos_token_id and eos_token_id are null, and texts need a beginning"
            )
        self.name, self.prefix = str(file), exported.separator
        self.ends = frozenset(end if isinstance(end, list) else [end])
        self._fast = Fast.from_file(str(file))
        self._fast.no_truncation()
        self._fast.no_padding()
        self.opening: list[int] = self._fast.encode("").ids

    def encode(self, text: str) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self._fast.decode(tokens, skip_special_tokens=False))


def evaluate_tasks(config: EvalConfig) -> Path:
    """Measures the tasks of `config.downstream`, prints a table and writes it all as JSON; returns that file.

    Raises ConfigError for settings that cannot be, DataError for a task whose data cannot be had, and what loading a
    model raises.
    """
    _check(config)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from lrattnres.evaluation.harness import HarnessModel

    if config.threads:
        torch.set_num_threads(config.threads)
    assert config.downstream is not None
    # The harness's own index is some thousand files long, and not needed where all tasks are one's own.
    manager = TaskManager(include_path=config.tasks, include_defaults=False)
    if not set(config.downstream) <= set(manager.all_tasks):
        manager = TaskManager(include_path=config.tasks)
    check_names(config.downstream, manager.all_tasks)
    folder, source = find_weights(config, print)
    tokenizer: Trained | Pretrained
    if (
        isinstance(source, Exported) and not folder.config_path.exists()
    ):  # it was never trained here
        settings, precision, named = source.model, Precision.float32, source.tokenizer
        tokenizer = Trained(build_tokenizer(TokenizerName[named])) if named else Pretrained(source)
    else:
        run = run_of(folder, source)
        settings, precision, tokenizer = (
            run.model,
            run.precision,
            Trained(tokenizer_of(folder, run)),
        )
    model = load_weights(settings, source, config, config.precision or precision)
    backends = {
        "device": str(model.head.weight.device),
        "precision": (config.precision or precision).name,
    }
    backends |= {"attention": model.attention.name, "depth_kernels": model.kernels.name}
    print(
        f"{source.path}: {', '.join(backends.values())}; {len(config.downstream)} tasks, tokenizer {tokenizer.name}"
    )
    harness = HarnessModel(model, tokenizer, config.batch or BATCH)
    try:
        results = simple_evaluate(
            harness, tasks=list(config.downstream), num_fewshot=0, limit=config.limit, task_manager=manager,
            bootstrap_iters=RESAMPLES, log_samples=False,
        )  # fmt: skip
    except (OSError, ConnectionError) as fault:
        raise DataError(
            f"downstream={config.downstream}: the data of a task cannot be had: {fault}"
        ) from fault
    file = folder.path / "evaluation" / f"step_{source.step:06d}.downstream.json"
    file.parent.mkdir(exist_ok=True)
    assert results is not None
    kept = {
        name: results[name]
        for name in ("results", "versions", "n-shot", "n-samples")
        if name in results
    }
    kept["measured"] = {task: backends | {"limit": config.limit} for task in results["results"]}
    before = from_json(file.read_bytes()) if file.exists() else {}  # other tasks keep their results
    kept = {name: before.get(name, {}) | values for name, values in kept.items()}
    write_atomic(file, to_json(json.loads(json.dumps(kept, default=str)), indent=2) + "\n")
    print("\n".join(_table(results["results"])))
    return file


def _check(config: EvalConfig) -> None:
    unused = {"tokens": None, "diagnostics": False, "diagnostics_tokens": None, "cache": None}
    faults = [
        f"{name}={getattr(config, name)}: has no use with downstream=[…]; leave it out"
        for name, value in unused.items()
        if getattr(config, name) != value
    ]
    faults += device_faults(config)
    if not config.downstream:
        faults.append(
            "downstream=[]: names no task; write downstream=[hellaswag,piqa], or leave it out"
        )
    for name in ("batch", "limit"):
        value = getattr(config, name)
        if value is not None and value < 1:
            faults.append(f"{name}={value}: must be at least 1")
    if config.tasks is not None and not Path(config.tasks).is_dir():
        faults.append(f"tasks={config.tasks}: no such folder; write the folder of your task files")
    if placement()[1] > 1:
        faults.append("downstream=[…]: one process measures tasks; start it without torchrun")
    if importlib.util.find_spec("lm_eval") is None:
        faults.append(
            "downstream=[…]: the package lm_eval is not installed; `pip install lrattnres[eval]`"
        )
    if faults:
        raise ConfigError(faults)


def check_names(wanted: list[str], known: list[str]) -> None:
    """Raises ConfigError with every task that is not known, and what may have been meant."""
    faults = []
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            faults.append(
                f"downstream: {name} is no task of the harness, nor of tasks=FOLDER{hint}"
            )
    if faults:
        raise ConfigError(faults)


def _table(results: dict[str, dict[str, Any]]) -> list[str]:
    """One line a task and metric; names of metrics end with the harness's filter, which is seldom of interest."""
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
