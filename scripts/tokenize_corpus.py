"""Write a corpus as shards of tokens: `python scripts/tokenize_corpus.py data=… out=DIR workers=N`; see docs/data.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lrattnres.config import TokenizeConfig, defaults, parse
from lrattnres.config.checks import resolve_tokenize
from lrattnres.data.tokenizing import tokenize_corpus
from lrattnres.entry import leave, loosened

CONFIGS = Path(__file__).parents[1] / "configs"


def run(tree: DictConfig) -> bool:
    """One corpus, printed when it is done."""
    values: Any = OmegaConf.to_container(tree, resolve=True)
    config = resolve_tokenize(parse(TokenizeConfig, values))
    report = tokenize_corpus(config)
    rate = report.written / report.seconds if report.seconds else 0.0
    print(
        f"{config.out}: {report.shards:,} shards, {report.documents:,} documents, {report.tokens:,} tokens; "
        f"{report.written:,} of them now, in {report.seconds:.1f} s, {rate:,.0f} tokens/s"
    )
    return True


@hydra.main(version_base="1.3", config_path="../configs", config_name="tokenize")
def main(tree: DictConfig) -> None:
    leave(lambda: run(tree))


if __name__ == "__main__":  # workers import this file, too
    ConfigStore.instance().store(name="tokenize_schema", node=defaults(TokenizeConfig))
    sys.argv[1:] = loosened(sys.argv[1:], CONFIGS)
    main()
