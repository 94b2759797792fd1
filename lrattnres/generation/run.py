"""Continuations of prompts by the model of a run, written as they grow."""

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
from lrattnres.evaluation.load import TrainedRun, load_run
from lrattnres.generation.text import TextStream
from lrattnres.model.decoder import Decoder
from lrattnres.model.generate import Generation, room
from lrattnres.model.sampling import Sampling
from lrattnres.runs.folder import RunError


class Job(NamedTuple):
    """One continuation that is asked for; tokens: the prompt's, with the separator that opens its document in front."""

    prompt: str
    sample: int
    tokens: list[int]


@dataclass
class Continuation:
    """text: what followed the prompt; tokens: how many were drawn; finish: end (of the document), stop or length."""

    job: Job
    text: str = ""
    tokens: int = 0
    finish: str = "length"

    def record(self) -> dict[str, str | int]:
        return {
            "prompt": self.job.prompt,
            "sample": self.job.sample,
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish,
        }


def generate_run(config: GenerateConfig, source: TextIO, target: TextIO) -> None:
    """Writes the continuations of all prompts to `target`, in their order; a single one piece by piece, as it grows.

    `source` is read for `prompt=-`. What was chosen is said on standard error.
    Raises ConfigError for settings that cannot be and prompts that do not fit, RunError and CheckpointError as for `load_run`.
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
    run = load_run(evaluation, _say)
    decoder = Decoder(run.model, run.tokenizer.separator, documents=run.settings.documents)
    jobs = _jobs(config, prompts, run)
    _say(
        f"{run.checkpoint.path}: {decoder.device}, {run.settings.precision.name}, attention cached, "
        f"depth kernels {decoder.many.router.kernels.name} over the prompt, {decoder.one.router.kernels.name} over a token"
    )
    try:
        if len(jobs) == 1 and not config.json:
            _stream(config, run, decoder, jobs[0], target)
            return
        for start in range(0, len(jobs), config.batch):
            for found in _finished(config, run, decoder, jobs[start : start + config.batch]):
                text = (found.job.prompt if config.echo else "") + found.text
                print(
                    json.dumps(found.record(), ensure_ascii=False) if config.json else text,
                    file=target,
                    flush=True,
                )
    except FloatingPointError as fault:
        raise RunError(
            f"{run.checkpoint.path}: {fault}; write step=… of a checkpoint before the run diverged"
        ) from fault


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _prompts(config: GenerateConfig, source: TextIO) -> list[str]:
    """Raises ConfigError for what is not UTF-8: a command line holds the bytes of others as lone surrogates."""
    try:
        text = source.read() if config.prompt == "-" else config.prompt
        text.encode("utf-8")
    except UnicodeError as fault:
        raise ConfigError(
            [f"prompt: not UTF-8: {fault}; convert it first, with iconv for example"]
        ) from fault
    prompts = _split(text) if config.lines else [text]
    if not prompts:
        raise ConfigError(
            ["lines=true: there is no line; for a prompt of no characters write lines=false"]
        )
    return prompts


def _split(text: str) -> list[str]:
    """Lines without their ends, which are line feeds: other characters that break lines may be part of a prompt."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def _jobs(config: GenerateConfig, prompts: Sequence[str], run: TrainedRun) -> list[Job]:
    """Every prompt as often as it has samples. Raises ConfigError that names all that do not fit into the context."""
    encoded = [
        [run.tokenizer.separator, *run.tokenizer.encode(prompt).tolist()] for prompt in prompts
    ]
    faults = []
    for number, tokens in enumerate(encoded, start=1):
        try:
            room(len(tokens), config.tokens, run.settings.model.context)
        except ValueError as fault:
            faults.append(f"prompt {number}: {fault}" if config.lines else f"prompt: {fault}")
    if faults:
        raise ConfigError(faults)
    pairs = product(zip(prompts, encoded, strict=True), range(config.samples))
    return [Job(prompt, sample, tokens) for (prompt, tokens), sample in pairs]


def _grow(
    config: GenerateConfig, run: TrainedRun, decoder: Decoder, jobs: Sequence[Job]
) -> Iterator[tuple[int, str, Continuation]]:
    """(row, piece of text, what there is of that row) after every token and at the end of every row."""
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.min_p)
    streams = [TextStream(run.tokenizer, config.stop) for _ in jobs]
    found = [Continuation(job) for job in jobs]
    prompts, samples = [job.tokens for job in jobs], [job.sample for job in jobs]
    generation = Generation(
        decoder, prompts, sampling, tokens=config.tokens, seed=config.seed, samples=samples
    )
    while generation.rows:
        for row, token in generation.step().items():
            ends = config.end and token == run.tokenizer.separator
            piece = "" if ends else streams[row].push(token)
            found[row].tokens += 1
            if ends or streams[row].stopped or row not in generation.rows:
                piece += streams[row].close()
                generation.drop([row])
                found[row].finish = "stop" if streams[row].stopped else "end" if ends else "length"
            found[row].text += piece
            yield row, piece, found[row]


def _stream(
    config: GenerateConfig, run: TrainedRun, decoder: Decoder, job: Job, target: TextIO
) -> None:
    target.write(job.prompt if config.echo else "")
    for _, piece, _ in _grow(config, run, decoder, [job]):
        if piece:
            target.write(piece)
            target.flush()
    target.write("\n")
    target.flush()


def _finished(
    config: GenerateConfig, run: TrainedRun, decoder: Decoder, jobs: Sequence[Job]
) -> list[Continuation]:
    last = {row: continuation for row, _, continuation in _grow(config, run, decoder, jobs)}
    return [last[row] for row in range(len(jobs))]
