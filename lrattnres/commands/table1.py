"""Train the whole grid of the paper's Table 1.

    lrattnres table1 experiment=proxy runs=DIR [settings of training]

All 20 rows with one seed, then the baseline and the two low-rank rows of 8 blocks with two seeds
more. First it says how long that will take, from a few steps of the cheapest and the dearest row,
timed now. The same command continues where it was stopped: finished runs are skipped, begun ones
resumed. `plan=true` only says what is left.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from lrattnres.commands.composing import PACKAGE, TABLE1, composed, own_configs
from lrattnres.commands.running import command
from lrattnres.config import ConfigError, TrainConfig, option
from lrattnres.entry import run_name
from lrattnres.residual.cost import cost
from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.runs.folder import RunFolder
from lrattnres.runs.metrics import MetricsFile
from lrattnres.training.signals import STOPPED

SEEDED = ("01_baseline", "10_block8_p_lr_r32", "19_block8_s_lr_r64")
SEEDS = (1, 2)
STEPS = 6  # that are timed, the first of them not counted
PROBED = 2  # forward passes that a diagnosed token takes: every read is made twice
FORWARD = 1 / 3  # of a training step's time: the backward pass takes twice as long
TIMED = (
    *(f"steps={STEPS}", "name=timing", f"checkpoint.every={STEPS}", "logger=none"),
    *("evaluation.every=null", "evaluation.diagnostics_every=null", "evaluation.tokens=1"),
    *("instruments.log=1", "instruments.depth=null"),
    *(f"optimizer.{name}=0" for name in ("warmup", "warmdown", "momentum_rise", "momentum_fall")),
)


@dataclass
class GridConfig:
    plan: bool = option("only say what is left, and train nothing", False)


class Member(NamedTuple):
    """One run of the grid.

    Attributes:
        row: name of a file of configs/table1.
        config: what it trains.
        reads: multiply-adds of its reads a token.
        done: steps that a continuation need not repeat.
    """

    row: str
    config: TrainConfig
    reads: int
    done: int

    @property
    def tokens(self) -> float:
        """What is left, in tokens of training; an evaluated token counts as a forward pass."""
        config, evaluation = self.config, self.config.evaluation
        if self.done == config.steps:
            return 0

        def times(every: int) -> int:
            return -(-config.steps // every) - self.done // every

        passes = times(evaluation.every or config.steps) * evaluation.tokens
        if evaluation.diagnostics_every:
            probes = times(evaluation.diagnostics_every)
            passes += probes * evaluation.diagnostics_tokens * PROBED
        batch = config.global_batch * config.model.context
        return (config.steps - self.done) * batch + passes * FORWARD


def member(settings: list[str], row: str, *seed: str) -> Member:
    """A row with the settings of the grid, and a seed of its own (`seed=N`) if there is one."""
    words = [*settings, f"+table1={row}", *seed]
    chosen = dict(word.split("=", 1) for word in words)
    config = composed(words, name="unnamed")
    config.name = run_name(chosen.get("experiment", "paper"), config, words)
    folder = RunFolder(Path(config.runs) / config.name)
    saved = Checkpoints(folder.checkpoints_path).steps() if folder.checkpoints_path.is_dir() else []
    done = config.steps if folder.finished() else min(max(saved, default=0), config.steps - 1)
    reads = cost(config.model).added.mixing
    return Member(row, config, reads, done)


def training(*words: str) -> dict[str, Any]:
    """Arguments of `subprocess.Popen` for `lrattnres train WORDS` by this very package."""
    path = os.pathsep.join([str(PACKAGE.parent), *os.environ.get("PYTHONPATH", "").split(":")])
    return {
        "args": [sys.executable, "-m", "lrattnres", "train", *words],
        "env": os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)},
    }


def seconds_a_token(settings: list[str], row: str) -> float:
    """Measured in a run of a few steps, in a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="lrattnres-table1-") as folder:
        words = [*settings, f"+table1={row}", *TIMED, f"runs={folder}"]
        ended = subprocess.run(**training(*words), capture_output=True, text=True)
        if ended.returncode:
            print(ended.stdout, ended.stderr, sep="\n", file=sys.stderr)
            sys.exit(ended.returncode)
        records = MetricsFile.read(Path(folder) / "timing" / "metrics.jsonl")
    return 1 / statistics.median(record["tokens_per_second"] for record in records[1:])


def forecast(members: list[Member], settings: list[str]) -> str:
    """What is left, and for how long: a token's time is a line over what its reads cost.

    The line goes through two rows, which are measured here.
    """
    left = [member for member in members if member.tokens]
    finished, begun = len(members) - len(left), sum(member.done > 0 for member in left)
    counts = f"{len(members)} runs, {finished} of them finished, {begun} begun"
    if not left:
        return f"{counts}: nothing is left to train"
    ends = [choose(members, key=lambda member: member.reads) for choose in (min, max)]
    low, high = (seconds_a_token(settings, end.row) for end in ends)
    slope = (high - low) / (ends[1].reads - ends[0].reads)
    total = sum(member.tokens * (low + slope * (member.reads - ends[0].reads)) for member in left)
    batch = members[0].config.global_batch * members[0].config.model.context
    timed = ", ".join(
        f"{end.row} {a_token * batch:.3g} s" for end, a_token in zip(ends, (low, high), strict=True)
    )
    return f"{counts}: about {timedelta(seconds=round(total))} to go (a step takes now: {timed})"


def train(words: list[str]) -> int:
    """Training as a sweep, until it ends; it handles signals itself, and saves before it leaves."""
    child = subprocess.Popen(**training("-m", *words))
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal tells both
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    return child.wait()


def run(config: GridConfig, settings: list[str]) -> None:
    """The forecast, and then the grid."""
    own, settings = own_configs(settings)
    ours = ("seed", "name", "table1")
    strange = [
        word
        for word in settings
        if word.lstrip("+").split("=")[0] in ours or "=" not in word or word.startswith("-")
    ]
    if strange:
        what = "the grid sets rows, seeds and names by itself; leave it out"
        raise ConfigError([f"{word}: {what}" for word in strange])
    settings += [f"--config-dir={folder}" for folder in own]
    members = [member(settings, row) for row in TABLE1]
    members += [member(settings, row, f"seed={seed}") for seed in SEEDS for row in SEEDED]
    print(forecast(members, settings), flush=True)
    more = [f"+table1={','.join(SEEDED)}", f"seed={','.join(map(str, SEEDS))}"]
    codes = [0]
    for words in [] if config.plan else [["+table1=glob(*)"], more]:
        codes.append(train([*settings, *words]))
        if codes[-1] == STOPPED:
            break
    sys.exit(max(codes))


def main() -> None:
    command(__doc__, GridConfig, run, training=True)
