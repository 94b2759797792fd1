"""A model of ours as lm-evaluation-harness wants it: text in, log-likelihoods or text out.

Imported only where tasks are measured: the harness is an extra.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lrattnres.data.errors import DataError
from lrattnres.evaluation.words import Words
from lrattnres.model.decoder import Decoder
from lrattnres.model.generate import Generation
from lrattnres.model.sampling import Sampling
from lrattnres.model.transformer import Transformer

MOST_GENERATED = 256  # tokens, where a task says nothing: the harness's own number
Pair = tuple[tuple[str, str], list[int], list[int]]


class HarnessModel(TemplateLM):
    """A model as the harness wants it.

    Batches are padded on the right, where a causal model cannot see, so neither they nor their
    order change a result.
    """

    def __init__(
        self, model: Transformer, words: Words, batch: int, unlike_greedy: Sequence[str] = ()
    ):
        """
        Args:
            model: The model.
            words: How it reads and writes text.
            batch: Texts of a forward pass.
            unlike_greedy: Settings of the model under which its greedy decoding would not be what
                is done here, as key=value; tasks that generate are refused with them.
        """
        super().__init__()
        self.model, self.words, self.batch = model, words, batch
        self.context = model.config.context
        self.decoder = Decoder(model, words.prefix, documents=False)
        self.allowed = words.allowed(model.head.weight.shape[0])
        self.unlike_greedy = unlike_greedy

    @property
    def eot_token_id(self) -> int:
        return self.words.prefix

    @property
    def tokenizer_name(self) -> str:
        return self.words.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        bare = add_special_tokens is False or self.words.opens_itself(string)
        return ([] if bare else self.words.opening) + self.words.encode_for_task(string)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Of whole texts, in nats: every token once, in windows of the model's context.

        The opening is no part of a text; the first token follows the prefix.
        """
        pairs, owners = list[Pair](), list[int]()
        for number, request in enumerate(requests):
            tokens = self.words.encode_for_task(request.args[0])
            for window in get_rolling_token_windows(tokens, self.words.prefix, self.context, 1):
                pairs.append((("", ""), *make_disjoint_window(window)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(
            owners, self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm), strict=True
        ):
            sums[number] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation in nats, and whether greedy decoding would write it.

        What is longer than the model's context loses its beginning.

        Raises:
            DataError: A continuation alone is longer.
        """
        found: dict[int, tuple[float, bool]] = {}
        allowed = self.allowed.to(self.model.head.weight.device)
        order = sorted(
            range(len(requests)),
            key=lambda number: -len(requests[number][1]) - len(requests[number][2]),
        )
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm or None) as bar:
            for numbers in _chunks(order, self.batch):
                rows = [
                    (requests[number][1] + requests[number][2])[-self.context - 1 :]
                    for number in numbers
                ]
                logits = self._logits([row[:-1] for row in rows])
                for place, (number, row) in enumerate(zip(numbers, rows, strict=True)):
                    target = torch.tensor(requests[number][2], device=logits.device)
                    if not 0 < len(target) < len(row):
                        raise DataError(
                            f"a continuation of {len(target)} tokens: must be between 1 and "
                            f"{self.context}, the context; leave its task out of downstream=[…]"
                        )
                    scores = (
                        logits[place, len(row) - 1 - len(target) : len(row) - 1]
                        .float()
                        .log_softmax(-1)
                    )
                    chosen = scores.gather(-1, target.unsqueeze(-1)).sum(dtype=torch.float64).item()
                    likeliest = scores.masked_fill(~allowed, -torch.inf).argmax(-1)
                    found[number] = chosen, bool((likeliest == target).all())
                    if requests[number][0] != ("", ""):
                        self.cache_hook.add_partial(
                            "loglikelihood", requests[number][0], found[number]
                        )
                bar.update(len(numbers))
        return [found[number] for number in range(len(requests))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What greedy decoding writes before the first of the texts in `until`.

        Raises:
            DataError: A task samples, or the model's own settings change what greedy decoding is.
        """
        if self.unlike_greedy:
            raise DataError(
                f"{'; '.join(self.unlike_greedy)}: not had here, so tasks that generate would get "
                "other texts; take the setting out of the file, or leave these tasks out"
            )
        made: dict[int, str] = {}
        alike: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(_limits(request.args[1]), []).append(number)
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm or None) as bar:
            for (length, until), numbers in alike.items():
                most = max(
                    self.context - length, self.context // 2
                )  # a prompt keeps half of the context at least
                for chunk in _chunks(numbers, self.batch):
                    prompts = [
                        self.tok_encode(requests[number].args[0])[-most:] for number in chunk
                    ]
                    texts = self._continue(
                        [prompt or [self.words.prefix] for prompt in prompts], length, until
                    )
                    for number, text in zip(chunk, texts, strict=True):
                        made[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(chunk))
        return [made[number] for number in range(len(requests))]

    def _continue(self, prompts: list[list[int]], length: int, until: Sequence[str]) -> list[str]:
        """The one place that decodes: greedily, each prompt a document."""
        written = [list[int]() for _ in prompts]
        # Where nothing is said, the cache has room for the whole context, which is dear.
        fits = max(map(len, prompts)) + length <= self.context + 1
        generation = Generation(
            self.decoder,
            prompts,
            Sampling(temperature=0),
            tokens=length if fits else None,
            allowed=self.allowed,
        )
        while generation.rows:
            for number, token in generation.step().items():
                if token in self.words.ends:
                    generation.drop([number])
                    continue
                written[number].append(token)
                text = self.words.decode(written[number])
                if len(written[number]) == length or any(stop in text for stop in until):
                    generation.drop([number])
        texts = [self.words.decode(tokens, special=False) for tokens in written]
        return [
            text[: min((text.index(stop) for stop in until if stop in text), default=len(text))]
            for text in texts
        ]

    def _logits(self, rows: list[list[int]]) -> torch.Tensor:
        """[rows, longest, vocabulary]; each row is one document, from the beginning of a window."""
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [self.words.prefix] * (longest - len(row)) for row in rows])
        mask = self.model.mask(None, *tokens.shape)
        return self.model(tokens.to(self.model.head.weight.device), mask)


def _limits(options: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Most tokens, and the texts that end one."""
    if options.get("do_sample") or options.get("temperature"):
        raise DataError(
            f"generation_kwargs={options}: sampling is not had here; write do_sample: false and "
            "no temperature"
        )
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    length = next((int(options[name]) for name in names if options.get(name)), MOST_GENERATED)
    until = options.get("until") or []
    return length, tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)


def _chunks(numbers: list[int], size: int) -> Iterator[list[int]]:
    remaining = iter(numbers)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk
