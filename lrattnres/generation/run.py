"""Continuations of prompts by a trained model, written as they grow."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TextIO

from lrattnres.config import ConfigError, EvalConfig
from lrattnres.config.checks import checked
from lrattnres.config.commands import GenerateConfig
from lrattnres.evaluation.load import Loaded, load_run
from lrattnres.generation.text import TextStream
from lrattnres.model.decoder import Decoder
from lrattnres.model.generate import Generation, room
from lrattnres.model.sampling import Sampling
from lrattnres.runs.folder import RunError


class Job(NamedTuple):
    """One continuation that is asked for; `tokens` are the prompt's, with its opening in front."""

    prompt: str
    sample: int
    tokens: list[int]


@dataclass
class Continuation:
    """What followed a prompt.

    Attributes:
        text: The text.
        tokens: How many were drawn.
        finish: Why it ended: end (of the document), stop or length.
    """

    job: Job
    text: str = ""
    tokens: int = 0
    finish: str = "length"

    def record(self) -> dict[str, str | int]:
        """One line of JSON."""
        return {
            "prompt": self.job.prompt,
            "sample": self.job.sample,
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish,
        }


def generate_run(config: GenerateConfig, source: TextIO, target: TextIO) -> None:
    """Writes the continuations of all prompts, in their order; a single one as it grows.

    What was chosen is said on standard error.

    Args:
        config: The settings of the command.
        source: Is read for `prompt=-`.
        target: Gets the text.

    Raises:
        ConfigError: The settings cannot be, or a prompt does not fit.
        RunError, CheckpointError, FolderError: The model cannot be loaded; see `load_run`.
    """
    prompts = _prompts(checked(config), source)
    evaluation = EvalConfig(
        config.run,
        step=config.step,
        device=config.device,
        precision=config.precision,
        kernels=config.kernels,
        threads=config.threads,
    )
    loaded = load_run(evaluation, _say)
    decoder = Decoder(loaded.model, loaded.words.prefix, documents=loaded.documents)
    jobs = _jobs(config, prompts, loaded)
    _say(
        f"{loaded.source.path}: {decoder.device}, {loaded.precision.name}, attention cached, "
        f"depth kernels {decoder.many.kernels.name} over the prompt, "
        f"{decoder.one.kernels.name} over a token"
    )
    try:
        if len(jobs) == 1 and not config.json:
            _stream(config, loaded, decoder, jobs[0], target)
            return
        for start in range(0, len(jobs), config.batch):
            for found in _finished(config, loaded, decoder, jobs[start : start + config.batch]):
                text = (found.job.prompt if config.echo else "") + found.text
                print(
                    json.dumps(found.record(), ensure_ascii=False) if config.json else text,
                    file=target,
                    flush=True,
                )
    except FloatingPointError as error:
        raise RunError(
            f"{loaded.source.path}: {error}; write step=… of a checkpoint before the run diverged"
        ) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _prompts(config: GenerateConfig, source: TextIO) -> list[str]:
    """Raises ConfigError for bytes that are not UTF-8: a command line has them as surrogates."""
    try:
        text = source.read() if config.prompt == "-" else config.prompt
        text.encode("utf-8")
    except UnicodeError as error:
        raise ConfigError(
            [f"prompt: not UTF-8: {error}; convert it first, with iconv for example"]
        ) from error
    prompts = _split(text) if config.lines else [text]
    if not prompts:
        raise ConfigError(
            ["lines=true: there is no line; for a prompt of no characters write lines=false"]
        )
    return prompts


def _split(text: str) -> list[str]:
    """Lines without their line feeds; other characters that break lines may be in a prompt."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def _jobs(config: GenerateConfig, prompts: Sequence[str], loaded: Loaded) -> list[Job]:
    """Every prompt for each of its samples. Raises ConfigError with all that do not fit."""
    words = loaded.words
    encoded = [words.opening + words.encode(prompt) or [words.prefix] for prompt in prompts]
    errors = []
    for number, tokens in enumerate(encoded, start=1):
        try:
            room(len(tokens), config.tokens, loaded.model.config.context)
        except ValueError as error:
            errors.append(f"prompt {number}: {error}" if config.lines else f"prompt: {error}")
    if errors:
        raise ConfigError(errors)
    pairs = product(zip(prompts, encoded, strict=True), range(config.samples))
    return [Job(prompt, sample, tokens) for (prompt, tokens), sample in pairs]


def _grow(
    config: GenerateConfig, loaded: Loaded, decoder: Decoder, jobs: Sequence[Job]
) -> Iterator[tuple[int, str, Continuation]]:
    """Row, new piece of text, and what there is of the row: after every token of every row."""
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.min_p)
    words = loaded.words
    streams = [TextStream(words, config.stop, first=not job.prompt) for job in jobs]
    found = [Continuation(job) for job in jobs]
    prompts, samples = [job.tokens for job in jobs], [job.sample for job in jobs]
    generation = Generation(
        decoder,
        prompts,
        sampling,
        tokens=config.tokens,
        seed=config.seed,
        samples=samples,
        allowed=words.allowed(loaded.model.head.weight.shape[0]),
    )
    while generation.rows:
        for row, token in generation.step().items():
            ends = config.end and token in words.ends
            piece = "" if ends else streams[row].push(token)
            found[row].tokens += 1
            if ends or streams[row].stopped or row not in generation.rows:
                piece += streams[row].close()
                generation.drop([row])
                found[row].finish = "stop" if streams[row].stopped else "end" if ends else "length"
            found[row].text += piece
            yield row, piece, found[row]


def _stream(
    config: GenerateConfig, loaded: Loaded, decoder: Decoder, job: Job, target: TextIO
) -> None:
    target.write(job.prompt if config.echo else "")
    for _, piece, _ in _grow(config, loaded, decoder, [job]):
        if piece:
            target.write(piece)
            target.flush()
    target.write("\n")
    target.flush()


def _finished(
    config: GenerateConfig, loaded: Loaded, decoder: Decoder, jobs: Sequence[Job]
) -> list[Continuation]:
    last = {row: continuation for row, _, continuation in _grow(config, loaded, decoder, jobs)}
    return [last[row] for row in range(len(jobs))]
