"""Write a corpus as shards of tokens.

    lrattnres tokenize data=… out=DIR workers=N

docs/data.md tells more.
"""

from __future__ import annotations

from omegaconf import DictConfig

from lrattnres.commands.composing import start
from lrattnres.config import TokenizeConfig, parse
from lrattnres.config.checks import checked
from lrattnres.data.tokenizing import tokenize_corpus
from lrattnres.entry import leave, plain_settings


def run(tree: DictConfig) -> bool:
    """One corpus, printed when it is done."""
    config = checked(parse(TokenizeConfig, plain_settings(tree)))
    report = tokenize_corpus(config)
    rate = report.written / report.seconds if report.seconds else 0.0
    print(
        f"{config.out}: {report.shards:,} shards, {report.documents:,} documents, "
        f"{report.tokens:,} tokens; {report.written:,} of them now, in {report.seconds:.1f} s, "
        f"{rate:,.0f} tokens/s"
    )
    return True


def task(tree: DictConfig) -> None:
    leave(lambda: run(tree))


def main() -> None:
    start("tokenize", TokenizeConfig, task)
