"""Which ranks of a job are alive: each tells a count and its step to the rendezvous' store."""

from __future__ import annotations

import contextlib
import threading
import time

from torch.distributed.distributed_c10d import PrefixStore, Store

BEAT = 0.5  # seconds between two signs of life of a rank
SILENCE = 3.0  # seconds without one after which a rank counts as gone


class Liveness:
    """The signs of life of `world` ranks, of which this process is number `rank`.

    A thread gives those of this process until the process, or the store, is gone. `step` is told
    with them, so that the others can say how far a lost rank had come.
    """

    def __init__(self, store: Store, rank: int, world: int):
        self.rank, self.world, self.step = rank, world, 0
        self._store = PrefixStore("lrattnres", store.clone())  # type: ignore[attr-defined]
        # A connection of its own: a call waits for the one before it.
        beats = PrefixStore("lrattnres", store.clone())  # type: ignore[attr-defined]
        threading.Thread(target=self._beat, args=(beats,), daemon=True).start()

    def lost(self) -> str | None:
        """Which ranks are gone, after a collective has failed. Takes some seconds.

        Returns:
            Their numbers and the steps they were in, the same sentence on every rank. None if all
            of them live: then the network, or the slowest of them, is to blame.
        """
        try:
            before = self._beats()
            time.sleep(SILENCE)
            gone = [
                rank
                for rank, beat in self._beats().items()
                if beat == before[rank] and rank != self.rank
            ]
            if not gone:
                return None
            names = ", ".join(f"rank {rank} (in step {before[rank].split()[1]})" for rank in gone)
            # Whoever finds out first is right: those who leave because of it fall silent too.
            return self._store.compare_set("lost", "", names).decode()
        except RuntimeError:
            return "the machine of the rendezvous"

    def _beats(self) -> dict[int, str]:
        return {rank: self._store.get(f"beat/{rank}").decode() for rank in range(self.world)}

    def _beat(self, store: Store) -> None:
        with contextlib.suppress(RuntimeError):
            for count in range(2**62):
                store.set(f"beat/{self.rank}", f"{count} {self.step}")
                time.sleep(BEAT)
