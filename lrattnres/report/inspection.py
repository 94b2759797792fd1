"""Where a given text is read in the depth of a trained model: numbers as JSON, and two pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import torch

from lrattnres.config import ConfigError, EvalConfig
from lrattnres.config.checks import checked
from lrattnres.config.commands import InspectConfig
from lrattnres.evaluation.load import Loaded, load_run
from lrattnres.evaluation.reads import reads_record
from lrattnres.evaluation.run import results_folder
from lrattnres.runs.files import to_json, write_atomic

PANELS = 6  # sites of the picture over tokens, unless some are named


def inspect_run(config: InspectConfig, source: TextIO) -> Path:
    """Writes reads.json, tokens.png and sites.png, and prints where they are.

    The end-of-text token that opens every document is put in front of the text. A path that attends
    shows α, another one the coefficients of the outputs.

    Args:
        config: The settings of the command.
        source: Is read for `text=-`.

    Returns:
        The folder of the files.

    Raises:
        ConfigError: A setting is impossible, the text has more tokens than the context, or the
            model's reads have neither α nor coefficients.
        RunError: As `load_run` raises it.
        CheckpointError: As `load_run` raises it.
    """
    text = _text(checked(config), source)
    evaluation = EvalConfig(
        config.run,
        step=config.step,
        device=config.device,
        precision=config.precision,
        threads=config.threads,
    )
    run = load_run(evaluation, print)
    words = run.words
    tokens = torch.tensor(words.opening + words.encode(text) or [words.prefix])
    shown = range(config.first, min(config.first + config.shown, len(tokens)))
    sites = _checked(config, run, len(tokens))
    record = _named(run) | reads_record(run.model, words, tokens, documents=run.documents)

    out = results_folder(Path(config.out) if config.out else run.folder.path / "inspection")
    write_atomic(out / "reads.json", to_json(record) + "\n")
    title = f"{run.folder.path.name}, step {run.source.step}"
    part = f"tokens {shown.start} to {shown.stop - 1} of {len(tokens)}"
    from lrattnres.report.reads import mean_heatmap, token_heatmap  # not before there is a model

    token_heatmap(record, sites, shown, f"{title}: {part}", out / "tokens.png")
    mean_heatmap(record, f"{title}: mean over {len(tokens)} tokens", out / "sites.png")
    what = "α" if run.model.router.attends else "coefficients"
    print(f"{what} of {len(tokens)} tokens at {len(record['sites'])} sites: {out / 'reads.json'}")
    print(f"{part}, {len(sites)} sites: {out / 'tokens.png'}")
    print(f"all sites, mean over the tokens: {out / 'sites.png'}")
    return out


def _text(config: InspectConfig, source: TextIO) -> str:
    """The text of the settings.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8.
    """
    try:
        if config.file:
            # `read_text` would change the line ends.
            text: str | None = Path(config.file).read_bytes().decode("utf-8")
        else:
            text = source.read() if config.text == "-" else config.text
        assert text is not None  # `checked` has seen that one of the two is there
        text.encode("utf-8")
    except UnicodeError as error:
        raise ConfigError(
            [f"text: not UTF-8: {error}; convert it first, with iconv for example"]
        ) from error
    except OSError as error:
        raise ConfigError([f"file={config.file}: cannot be read: {error.strerror}"]) from error
    return text


def _checked(config: InspectConfig, run: Loaded, tokens: int) -> list[int]:
    """The sites of the picture over tokens, from 1; checks all that depends on run and text.

    Raises:
        ConfigError: Lists every error.
    """
    model, path, last = run.model.config, run.model.router, 2 * run.model.config.layers + 1
    if not (path.attends or path.linear):
        raise ConfigError(
            [
                f"run={config.run}: a read of model.residual={model.residual} with these settings "
                "is no sum of the outputs with one number each; write a run of another path"
            ]
        )
    first = 2 if path.attends else 1
    words = config.sites.split(",") if config.sites is not None else []
    names = {str(site): site for site in range(first, last + 1)} | {"head": last}
    errors = [
        f"sites={config.sites}: {word!r} must be {first} to {last - 1}, the sub-layer that a site "
        "feeds, or head"
        for word in words
        if word.strip() not in names
    ]
    if tokens > model.context:
        errors.append(
            f"text: {tokens} tokens, the end-of-text in front included, are more than the context "
            f"of {model.context}"
        )
    if config.first >= tokens:
        errors.append(
            f"first={config.first}: the text has {tokens} tokens; write 0 to {tokens - 1}"
        )
    if errors:
        raise ConfigError(errors)
    chosen = {names[word.strip()] for word in words}
    return sorted(chosen or {2 + round(step * (last - 2) / (PANELS - 1)) for step in range(PANELS)})


def _named(run: Loaded) -> dict[str, Any]:
    return {
        "run": run.folder.path.name,
        "step": run.source.step,
        "residual": run.model.config.residual,
    }
