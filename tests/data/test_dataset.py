"""What a run opens: who asks the store, what is told at the start, and where it goes on."""

import threading
import warnings
from dataclasses import dataclass, field

import pytest
import torch

from lrattnres.config.checks import resolve
from lrattnres.data.dataset import open_dataset
from lrattnres.distributed.ranks import Ranks
from lrattnres.training.run import _open_data
from lrattnres.training.trainer import Trainer
from tests.config.test_config import composed
from tests.data.serving import serving, write_rows

WORLD = 4


@dataclass
class Threads(Ranks):
    """Ranks that are threads of this process, two to a machine."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(WORLD))
    box: list = field(default_factory=list)

    def all_succeed(self, action):
        value = action()
        self.barrier.wait(60)
        return value

    def apart(self, timeout):
        return self

    def of_first(self, action):
        if self.first:
            self.box[:] = [action()]
        self.barrier.wait(60)
        value = self.box[0]
        self.barrier.wait(60)
        return value


@pytest.fixture
def streaming(tiny_run, tmp_path):
    """Settings of a small run that streams the folder `en` of a server, which holds 8 files."""
    for number in range(8):
        texts = [f"{number} {row} " * 9 for row in range(30)]
        write_rows(tmp_path / "en" / f"part-{number}.parquet", texts, row_group_size=10)

    def settings(root: str, *changes: str):
        more = ["data=ultra_fineweb", f"data.root={root}", "data.workers=0", "data.retries=1"]
        return resolve(composed(*tiny_run(*more, "data.holdout=0.2", *changes)))[0]

    return settings


def test_one_rank_asks_the_store_and_tells_the_others(streaming, tmp_path):
    with serving(tmp_path) as server:
        config = streaming(f"{server.address}/en")
        barrier, box, found = threading.Barrier(WORLD), [], {}

        def start(rank: int) -> None:
            ranks = Threads(rank, WORLD, rank % 2, barrier=barrier, box=box)
            found[rank] = _open_data(config, ranks)

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len({dataset.documents.fingerprint for dataset in found.values()}) == 1
        asked = [method for method, path in server.requests if path.endswith("/en/")]
        assert len(found) == WORLD and asked == ["GET"]
        assert sum(method == "HEAD" for method, _ in server.requests) == 8
        config.runs, server.requests[:] = str(tmp_path / "none"), []
        open_dataset(config, found[0].documents.listing)
        assert not server.requests


@pytest.mark.parametrize("corpus", ["files", "ultra_fineweb"])
def test_a_shortage_of_held_out_tokens_is_told_at_the_start(streaming, tmp_path, corpus):
    changes = [f"data={corpus}", "data.column=content"]
    dataset = open_dataset(streaming(tmp_path / "en", *changes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset.prepare_held_out()
    dataset.config.evaluation.tokens = 10**6
    with pytest.warns(UserWarning, match=r"1,000,000 held-out tokens .* only [\d,]+ are there"):
        dataset.prepare_held_out()


def test_skipped_rows_are_told_and_counted_and_an_older_state_is_continued(
    streaming, tmp_path, monkeypatch
):
    write_rows(tmp_path / "en" / "part-9.parquet", [None, "", "a"] * 10, row_group_size=10)
    dataset = open_dataset(streaming(tmp_path / "en"))
    streams = dataset.streams()
    assert "empty of the" in dataset.description and "rows read so far" in dataset.description
    for _ in range(60):
        streams.next_batch()
    state = streams.state()
    assert streams.skipped_rows == int(state[:, 4].sum()) >= 20

    class Checkpoint:  # with the keys of either version
        def __init__(self, *keys):
            self._keys, self.details = keys, {}

        def keys(self, name):
            return list(self._keys) if name == "loader" else []

        def load(self, tree):
            assert tree["loader"].keys() == set(self._keys)
            tree["loader"]["streams"].copy_(state[:, :4])
            if "skipped_rows" in tree["loader"]:
                tree["loader"]["skipped_rows"].copy_(state[:, 4])

    trainer = Trainer.__new__(Trainer)
    trainer.ranks, trainer.streams = Ranks(), dataset.streams()
    tree = {"model": {}, "progress": {}, "gradients": {"norm_sum": torch.zeros(())}}
    trainer.grad_norms = torch.zeros(())

    def small(self):
        places = self.streams.state()
        rows = {"streams": places[:, :4].contiguous(), "skipped_rows": places[:, 4].contiguous()}
        return tree | {"loader": rows, "random": {}}

    monkeypatch.setattr(Trainer, "state", small)
    for keys, rows in ((("streams", "skipped_rows"), state[:, 4]), (("streams",), 0 * state[:, 4])):
        trainer.restore(Checkpoint(*keys))
        assert torch.equal(trainer.streams.state()[:, :4], state[:, :4])
        assert torch.equal(trainer.streams.state()[:, 4], rows)
