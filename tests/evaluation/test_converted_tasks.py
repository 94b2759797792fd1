"""Tasks on a converted model: what the harness itself measures on the model it was made of."""

import json
from pathlib import Path

import pytest
import torch

from lrattnres.config import EvalConfig
from lrattnres.config.commands import ConvertConfig
from lrattnres.data.errors import DataError
from lrattnres.entry import settings
from lrattnres.evaluation.downstream import unlike_greedy
from lrattnres.evaluation.load import load_run
from lrattnres.exchange.convert import convert

transformers = pytest.importorskip("transformers", reason="it makes the models that are converted")
pytest.importorskip("lm_eval", reason="it measures tasks, the extra [eval]")
pytest.importorskip("accelerate", reason="the harness's own backend imports it")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from lrattnres.evaluation.harness import HarnessModel  # noqa: E402
from tests.exchange.given import byte_level, pretrained, sentence_piece, write  # noqa: E402

PAIRS = [
    ("the router", " reads"),
    ("the router ", "reads what"),
    ("", "the router"),
    ("", "<s> what"),
    ("<s>the router", " é"),
    ("mixes" * 30, " keys"),
    ("a", "</s>"),
]
TOKENIZERS = {
    "none": lambda: byte_level(),
    "one": lambda: byte_level("<s> $A"),
    "two": lambda: byte_level("<s> <x> $A"),
    "sentence piece": sentence_piece,
}


def both(folder: Path, tokenizer, ends: list[int] | None = None):
    """Ours on the converted model, the harness's own on the given one; and the given one."""
    pretrained(folder, tokenizer)
    if ends:
        write(folder / "generation_config.json", eos_token_id=ends)
    out = folder.with_name("out")
    convert(settings(ConvertConfig, [f"source={folder}", f"out={out}", "model.residual=baseline"]))
    loaded = load_run(EvalConfig(str(out)), print)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    words.pad_token = "</s>"
    ours = HarnessModel(loaded.model, loaded.words, 3, unlike_greedy(loaded.source))
    return ours, HFLM(pretrained=model, tokenizer=words, batch_size=1, device="cpu"), model


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, pair, number) for number, pair in enumerate(arguments)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_loglikelihoods_are_those_of_the_harness(tmp_path: Path, name: str) -> None:
    ours, theirs, _ = both(tmp_path / "given", TOKENIZERS[name]())
    found = ours.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    expected = theirs.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], abs=1e-3
    )
    assert [likely for _, likely in found] == [likely for _, likely in expected]


@pytest.mark.parametrize("template", ["$A </s>", "<s> $A </s>", "<s> <x> $A </s> <x>"])
def test_what_stands_behind_a_text_is_not_put_before_it(tmp_path: Path, template: str) -> None:
    """Against the given model, one text at a time; the harness's own backend cannot do it."""
    tokenizer = byte_level(template)
    ours, _, model = both(tmp_path / "given", tokenizer)
    pairs = [(context, text) for context, text in PAIRS[:2] if context.strip() == context]
    for (context, text), (value, _) in zip(
        pairs, ours.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True), strict=True
    ):
        opening = [0] * ("<s> " in template) + [2] * ("<x> $A" in template)
        before, after = (
            tokenizer.encode(part, add_special_tokens=False).ids
            for part in (context, context + text)
        )
        row = torch.tensor([opening + after])
        with torch.no_grad():
            scores = model(row).logits[0, :-1].double().log_softmax(-1)
        each = scores.gather(-1, row[0, 1:, None])[:, 0]
        assert value == pytest.approx(each[len(opening) + len(before) - 1 :].sum().item(), abs=1e-3)


def test_generated_texts_are_those_of_the_harness(tmp_path: Path) -> None:
    """With an end that generation_config.json alone names, and special tokens that are left out."""
    contexts = ["the router", "mixes keys", "<s>what", "it" * 40]
    limits = {"until": ["zz"], "max_gen_toks": 12}
    asked = requests("generate_until", [(context, limits) for context in contexts])
    ours, theirs, model = both(tmp_path / "given", byte_level("<s> $A"))
    free = ours.generate_until(asked, disable_tqdm=True)
    assert free == theirs.generate_until(asked, disable_tqdm=True)
    row = torch.tensor([[0, *ours.words.encode("the router")]])
    ends = [1, int(model.generate(row, max_new_tokens=6, do_sample=False, pad_token_id=1)[0, -1])]
    (tmp_path / "again").mkdir()
    ours, theirs, _ = both(tmp_path / "again" / "given", byte_level("<s> $A"), ends)
    found = ours.generate_until(asked, disable_tqdm=True)
    assert found != free and [text.rstrip("�") for text in found] == [
        text.removesuffix(theirs.tok_decode([ends[1]])).rstrip("�")
        for text in theirs.generate_until(asked, disable_tqdm=True)
    ]


def test_settings_that_change_greedy_decoding_are_refused_where_texts_are_written(tmp_path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    ours, _, _ = both(folder, byte_level())
    assert ours.unlike_greedy == []
    write(tmp_path / "out" / "generation_config.json", repetition_penalty=1.05, num_beams=1)
    loaded = load_run(EvalConfig(str(tmp_path / "out")), print)
    ours = HarnessModel(loaded.model, loaded.words, 3, unlike_greedy(loaded.source))
    ours.loglikelihood(requests("loglikelihood", PAIRS[:1]), disable_tqdm=True)
    with pytest.raises(
        DataError, match=r"generation_config\.json: repetition_penalty=1.05: not had"
    ):
        ours.generate_until(requests("generate_until", [("a", {"until": ["b"]})]))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 1
