"""What the commands share: how they take arguments, and how they leave."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import reduce
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import distributed
from yaml import YAMLError  # type: ignore[import-untyped]

from lrattnres.config import ConfigError, TrainConfig, defaults, fields_of, flatten, parse, plain
from lrattnres.config.checks import checked
from lrattnres.config.schema import alternatives
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.distributed.ranks import RankError, causes, network_failed, placement
from lrattnres.exchange.folder import FolderError, read_exported
from lrattnres.residual.base import path_of
from lrattnres.runs.checkpoint import CheckpointError
from lrattnres.runs.folder import RunError
from lrattnres.runs.metrics import MetricsError
from lrattnres.runs.sweep import write_status
from lrattnres.training.signals import STOPPED, Stopped, StopRequest
from lrattnres.training.trainer import TrainingError

T = TypeVar("T")
FINISHED, FAULT, REFUSED, BROKEN_OFF, UNREADABLE = 0, 1, 2, 3, 74  # 74: EX_IOERR


PAPER_WIDTH = 1024
LONGEST = 150  # bytes of a folder's name; file systems take 255, and other names are made of it


class MemberFailed(Exception):
    """A run of a sweep failed; the others went on."""


def of_width(rank: int, *, _root_: DictConfig) -> int | None:
    """`${of_width:R}` in configs/: the same share of `model.dim` as R is of the paper's 1024.

    None where `model.dim` is no whole number, which is an error of its own.

    Raises:
        ConfigError: that share is no whole number.
    """
    dim = OmegaConf.select(_root_, "model.dim", throw_on_missing=False)
    if not isinstance(dim, int):
        return None
    scaled, rest = divmod(rank * dim, PAPER_WIDTH)
    if rest or not scaled:
        width = f"would be a key width of {rank * dim / PAPER_WIDTH:g}"
        raise ConfigError(
            [f"model.dim={dim}: {rank} of {PAPER_WIDTH} dimensions {width}; write model.rank=…"]
        )
    return scaled


OmegaConf.register_new_resolver("of_width", of_width, replace=True)


def plain_settings(tree: DictConfig) -> dict[str, Any]:
    """The composed tree as plain values.

    Raises:
        ConfigError: a value is made of others, and cannot be.
    """
    try:
        return OmegaConf.to_container(tree, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        own = next((cause for cause in causes(error) if isinstance(cause, ConfigError)), None)
        key = f"{error.full_key}: " if error.full_key else ""
        raise own or ConfigError([key + str(error).partition("\n")[0]]) from None


def loosened(arguments: Iterable[str], *configs: Path) -> list[str]:
    """Command-line settings as Hydra's `++key=value`: unknown keys reach the schema's check.

    Hydra stops at the first unknown key and proposes to add it; the schema names all of them, and
    what was meant. Choices of groups (the folders of `configs`) stay as they are.
    """
    groups = {folder.name for root in configs for folder in root.iterdir() if folder.is_dir()}
    setting = re.compile(r"\+{0,2}(?!hydra\.)([A-Za-z_][\w.]*)=")
    return [
        "++" + _quoted(argument.lstrip("+"))
        if (match := setting.match(argument)) and match[1] not in groups
        else argument
        for argument in arguments
    ]


def _quoted(argument: str) -> str:
    """A value with = in it, as the names of runs are, in the quotes that Hydra wants."""
    key, _, value = argument.partition("=")
    return f"{key}='{value}'" if "=" in value and not set(value) & set("'\",[]{}()") else argument


def settings(schema: type[T], arguments: Iterable[str]) -> T:
    """`key=value` words as checked settings, for commands that take any text as it stands.

    Args:
        schema: dataclass of the settings.
        arguments: texts are taken as they stand, other values as YAML. A key whose value is a list
            is written once for every member.

    Raises:
        ConfigError: with every error of type at once, then with every error of values.
    """
    leaves, tree, texts, errors = fields_of(schema), dict[str, Any](), dict[str, Any](), list[str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        kind = leaves[key][0] if key in leaves else None
        if not equals:
            errors.append(
                f"{argument}: must be key=value; put quotes around a text with spaces: "
                "key='two words'"
            )
        elif kind == list[str]:
            texts.setdefault(key, []).append(value)
        elif key in tree or key in texts:
            errors.append(f"{argument}: {key} is there already; write it once")
        elif str in alternatives(kind):
            texts[key] = None if value == "null" and kind is not str else value
        else:
            try:
                tree[key] = _from_yaml(value)
            except (OmegaConfBaseException, YAMLError, ValueError) as error:
                errors.append(f"{argument}: cannot be read: {one_line(error)}")
    empty = {key: [] if isinstance(text, list) else "" for key, text in texts.items()}
    try:
        config = parse(schema, tree | empty)
    except ConfigError as error:
        raise ConfigError(errors + error.errors) from None
    if errors:
        raise ConfigError(errors)
    for key, text in texts.items():
        *path, last = key.split(".")
        setattr(reduce(getattr, path, config), last, text)
    return checked(config)


def _from_yaml(value: str) -> Any:
    # YAML would take 000200 of step_000200 as octal.
    decimal = re.sub(r"^([+-]?)0+(?=\d)", r"\1", value)
    tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={decimal}"]), resolve=False)
    return tree["value"]


def one_line(error: BaseException) -> str:
    """The message of an error, its lines joined."""
    return " ".join(str(error).split())


def manual(schema: type, usage: str) -> str:
    """What `--help` shows: every key with its default and its meaning."""
    values, lines = flatten(defaults(schema)), []
    for key, (kind, metadata) in fields_of(schema).items():
        value = values[key]
        usual = (
            "…"
            if value == MISSING or kind == list[str]
            else "null"
            if value is None
            else str(value)
        )
        lines.append(
            f"  {key}={usual.lower() if isinstance(value, bool) else usual}".ljust(24)
            + " "
            + metadata["help"]
        )
    return "\n".join([usage, "", *lines])


def started_from(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The settings of a run; with `initial=DIR` the model is that folder's.

    Raises:
        ConfigError: the folder, or a setting beside it, cannot be.
    """
    initial = values.get("initial")
    if initial is None:
        return values
    if initial == "???":
        raise ConfigError(
            [
                "initial: not set; write initial=DIR, a folder made by scripts/export.py or "
                "scripts/convert.py"
            ]
        )
    try:
        exported, errors = read_exported(Path(initial)), []
    except FolderError as error:
        raise ConfigError([f"initial={initial}: {error}"]) from error
    for word in overrides:
        if re.match(r"[+~]*(model(\.[\w.]+)?|table1)(=|$)", word):
            errors.append(
                f"{word.lstrip('+')}: initial={initial} decides the model; scripts/convert.py "
                "makes another of it"
            )
    name = values["tokenizer"]["name"]
    if exported.tokenizer is None and exported.separator is None:
        errors.append(
            f"initial={initial}: no token opens a text; set bos_token_id in config.json of the "
            "source, and convert again"
        )
    elif exported.tokenizer is None:  # it has one of its own
        values["tokenizer"] |= {
            "name": "pretrained",
            "path": str(initial),
            "separator": exported.separator,
        }
        errors += [
            f"{word.lstrip('+')}: initial={initial} has a tokenizer of its own; leave it out"
            for word in overrides
            if re.match(r"[+~]*tokenizer(\.[\w.]+)?(=|$)", word)
        ]
    elif exported.tokenizer != name:
        errors.append(
            f"tokenizer={name}: initial={initial} was trained with {exported.tokenizer}; write "
            f"tokenizer={exported.tokenizer}"
        )
    if errors:
        raise ConfigError(errors)
    return values | {"model": plain(exported.model)}


def leave(run: Callable[[], bool]) -> None:
    """Runs to the end and exits.

    0 finished, 2 refused before anything was done, 3 broken off (it diverged, a rank was lost, or
    the disk is full), 74 data became unreadable (saved), 75 stopped by a signal (saved, if there
    was anything to save). Anything else is an error of ours, with its traceback, and 1.

    Args:
        run: Returns False if a signal stopped it.
    """
    _end(*attempt(run))


def take_part(folder: Path, run: Callable[[], bool]) -> None:
    """A run of a sweep: its state goes to `folder` and the sweep's table (see runs/sweep.py).

    A signal ends the whole sweep.

    Args:
        folder: Of the run.
        run: Returns False if a signal stopped it.

    Raises:
        MemberFailed: The run failed; the sweep goes on, and ends as failed.
    """
    first = placement()[0] == 0

    def begin_and_run() -> bool:
        if first:
            write_status(folder, "running")
        return run()

    with StopRequest() as late:  # what comes while a state is written waits until it is
        code, error = attempt(begin_and_run)
        if first:
            state = {FINISHED: "finished", STOPPED: "stopped", REFUSED: "refused"}.get(
                code, "failed"
            )
            try:
                write_status(folder, state, error if isinstance(error, Exception) else None)
            except RunError as refusal:  # told by the run itself, if it came that far
                print(f"{state}, which cannot be noted: {refusal}", file=sys.stderr)
    alone = (
        code == FAULT and distributed.is_initialized()
    )  # perhaps of this rank only: the others are in the run still
    if code == STOPPED or alone or network_failed(error):
        _end(code, error)
    if late.received:
        print(
            f"{late.received.name}: the sweep stops here; the same command continues",
            file=sys.stderr,
        )
        _end(STOPPED, None)
    if code != FINISHED:
        raise MemberFailed(
            f"{folder}: exit code {code}; see failure.txt there, and sweep.csv beside it"
        ) from None


def attempt(run: Callable[[], bool]) -> tuple[int, BaseException | None]:
    """Runs to the end, and prints what went wrong.

    Args:
        run: Returns False if a signal stopped it.

    Returns:
        The exit code, and what was raised.
    """
    try:
        with StopRequest(at_once=True):
            return (FINISHED if run() else STOPPED), None
    except Stopped as stop:
        print(f"{stop}: stopped outside of training; the same command continues", file=sys.stderr)
        return STOPPED, stop
    except UnreadableError as error:
        print(f"unreadable: {error}", file=sys.stderr)
        return UNREADABLE, error
    except (
        ConfigError,
        DataError,
        RunError,
        CheckpointError,
        FolderError,
        MetricsError,
    ) as error:
        heading = (
            "the configuration is not possible:\n"
            if isinstance(error, ConfigError)
            else "refused: "
        )
        print(f"{heading}{error}", file=sys.stderr)
        return (BROKEN_OFF if network_failed(error) else REFUSED), error
    except TrainingError as error:
        print(f"broken off: {error}", file=sys.stderr)
        return BROKEN_OFF, error
    except RankError as error:  # the other rank has told it
        return BROKEN_OFF, error
    except Exception as error:
        if network_failed(error):
            first_line = str(error).partition("\n")[0]
            print(
                f"broken off: a rank is gone, or too slow; the same command goes on ({first_line})",
                file=sys.stderr,
            )
            return BROKEN_OFF, error
        traceback.print_exc()
        return FAULT, error


def _end(code: int, error: BaseException | None) -> None:
    if distributed.is_initialized():
        if error is not None:
            # A usual exit would wait for ranks that may be gone, or in the middle of something.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        distributed.destroy_process_group()
    if code != FINISHED:
        sys.exit(code)


def refuse_early(arguments: Iterable[str]) -> None:
    """Exits with 2 for a `cluster=slurm` that Hydra could not use, or would not use at all."""
    arguments = list(arguments)
    if "cluster=slurm" not in arguments:
        return
    errors = []
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        errors.append(
            "cluster=slurm: needs the package hydra-submitit-launcher; `pip install "
            "lrattnres[slurm]`"
        )
    if not {"-m", "--multirun"} & set(arguments):
        errors.append(
            "cluster=slurm: submits the runs of a sweep; write `python train.py -m …`, even "
            "for a sweep of one"
        )
    if errors:
        print(
            "the configuration is not possible:\n" + "\n".join(f"  - {error}" for error in errors),
            file=sys.stderr,
        )
        sys.exit(REFUSED)


def of_paper(row: str, config: TrainConfig) -> str:
    """A line that says what a row of the paper's Table 1 is at this width."""
    rank, dim = config.model.rank, config.model.dim
    width = (
        f"rank {rank} of {dim} dimensions, as {rank * PAPER_WIDTH / dim:g} of {PAPER_WIDTH}"
        if rank
        else "no rank"
    )
    return f"table1={row}: {width}"


def run_name(experiment: str, config: TrainConfig, overrides: Iterable[str]) -> str:
    """The name of a run's folder: experiment, residual path, and every other choice of the command
    line, sorted.

    Choices on which no result depends do not count, so that they can change when a run is
    continued.
    """
    model = config.model
    parts = [experiment, model.residual, *path_of(model).label(model)]
    ignored = {
        "experiment",
        "path",
        "table1",
        "logger",
        "cluster",
        "name",
        "model.residual",
        "model.routing",
        "model.blocks",
        "model.rank",
    }
    ignored |= {
        key for key, (_, metadata) in fields_of(TrainConfig).items() if metadata["may_change"]
    }
    choices = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
    parts += [f"{key}={choices[key]}" for key in sorted(choices) if key not in ignored]
    return folder_name("-".join(parts))


def folder_name(text: str) -> str:
    """`text` as the name of a folder: no longer than 150 bytes, and another for another text."""
    name = re.sub(r"[^\w.=+-]", "_", text)
    content = name.encode()
    if len(content) <= LONGEST:
        return name
    mark = blake2b(content, digest_size=8).hexdigest()
    # A character that the cut goes through is left out whole.
    return f"{content[: LONGEST - 20].decode(errors='ignore')}-{mark}"
