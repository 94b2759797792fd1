"""Tasks through the real harness, on data of our own; log-likelihoods against a forward pass for
each text alone.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lrattnres.config import ConfigError, EvalConfig, ModelConfig, TokenizerName, parse, plain
from lrattnres.data.errors import DataError
from lrattnres.data.tokenizers import build_tokenizer
from lrattnres.evaluation.downstream import check_names, evaluate_tasks
from lrattnres.evaluation.words import PretrainedWords, TrainedWords
from lrattnres.exchange.folder import FolderError, read_exported, write_model
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.runs.folder import END, RunError
from tests import programs
from tests.config.test_config import composed
from tests.paths import ROOT

lm_eval = pytest.importorskip(
    "lm_eval", reason="tasks are measured by lm-evaluation-harness, the extra [eval]"
)
from lm_eval.api.instance import Instance  # noqa: E402

from lrattnres.evaluation.harness import HarnessModel  # noqa: E402

QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " a long way to go"], "answer": 0},
    {"question": "Two and two make", "choices": [" nothing at all", " four"], "answer": 1},
    {"question": "Water is", "choices": [" wet", " dry", " a colour"], "answer": 0},
]
TASKS = {
    "own_choices": """
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "own_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]""",
    "own_answers": """
output_type: generate_until
doc_to_text: question
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match}]""",
}

SHOWN = re.findall(
    r"```yaml\n(.*?)```", (ROOT / "docs" / "using_models.md").read_text(), re.DOTALL
)[0]


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(
        "delta", None, 2, layers=2, dim=16, heads=2, mlp_width=24, context=24, vocabulary=257
    )
    made = build_model(
        config, seed=0, device=torch.device("cpu"), attention=BACKENDS["sdpa"], dtype=torch.float32
    )
    for parameter in made.parameters():  # far from uniform
        torch.nn.init.normal_(
            parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel())
        )
    return made


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (folder / "sky.yaml").write_text(SHOWN.replace("my_tasks/sky.jsonl", str(data)))
    source = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
    )
    for name, rest in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{rest}\n")
    return folder


@pytest.fixture(scope="module")
def folder(model: Transformer, tmp_path_factory) -> Path:
    """The model as an exported folder, without a run around it."""
    path = tmp_path_factory.mktemp("model")
    write_model(
        path,
        model.config,
        model.state_dict(),
        "",
        tokenizer="bytes",
        separator=256,
        ends=[256],
        step=3,
    )
    return path


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, pair, number) for number, pair in enumerate(arguments)]


@torch.no_grad()
def directly(model: Transformer, context: str, continuation: str) -> tuple[float, bool]:
    """One text alone, in float64 after the model: no batch, no padding, no harness."""
    tokens = torch.tensor(
        [[256, *context.encode(), *continuation.encode()][-model.config.context - 1 :]]
    )
    scores = (
        model(tokens[:, :-1], model.mask(None, 1, tokens.shape[1] - 1))[0].double().log_softmax(-1)
    )
    count = len(continuation.encode())
    last, target = scores[-count:], tokens[0, -count:]
    return last.gather(-1, target[:, None]).sum().item(), bool((last.argmax(-1) == target).all())


PAIRS = [
    ("", "a"),
    ("The sky is", " blue"),
    ("x" * 40, " and a tail"),
    ("Two and two make", " four"),
    ("long-" * 3, "er" * 8),
]


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_loglikelihoods_are_those_of_each_text_alone(model: Transformer, batch: int) -> None:
    harness = HarnessModel(model, TrainedWords(build_tokenizer(TokenizerName.bytes)), batch)
    greedy = harness.generate_until(
        requests("generate_until", [("The sky is", {"until": [], "max_gen_toks": 1})])
    )[0]
    pairs = [*PAIRS, ("The sky is", greedy)]
    found = harness.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    expected = [directly(model, *pair) for pair in pairs]
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], abs=1e-4
    )
    assert [likely for _, likely in found] == [likely for _, likely in expected]
    with pytest.raises(
        DataError,
        match=r"a continuation of 30 tokens: must be between 1 and 24.*leave its task out",
    ):
        harness.loglikelihood(requests("loglikelihood", [("a", "b" * 30)]))


def test_a_rolling_loglikelihood_predicts_every_token_once(model: Transformer) -> None:
    harness = HarnessModel(model, TrainedWords(build_tokenizer(TokenizerName.bytes)), 2)
    texts = ["short", "a text of more than one window, which the model reads in parts", "second"]
    found = harness.loglikelihood_rolling(
        requests("loglikelihood_rolling", [(text,) for text in texts])
    )
    for text, value in zip(texts, found, strict=True):
        whole = [256, *text.encode()]
        total = directly(model, "", text[:24])[0]
        for start in range(
            24, len(text), 24
        ):  # later windows see a full context, and score what is new
            new = whole[1 + start : 25 + start]
            seen = torch.tensor([whole[start + len(new) - 24 : start + len(new)]])
            with torch.no_grad():
                scores = model(seen, model.mask(None, *seen.shape))[0].double().log_softmax(-1)
            total += sum(
                scores[len(scores) - len(new) + place, token].item()
                for place, token in enumerate(new)
            )
        assert value == pytest.approx(total, abs=1e-4)


def test_generation_is_greedy_and_stops(model: Transformer) -> None:
    harness = HarnessModel(model, TrainedWords(build_tokenizer(TokenizerName.bytes)), 4)
    prompts = ["The sky is", "a", "Two and two"]
    limits = {"until": ["\x00none"], "max_gen_toks": 6}
    texts = harness.generate_until(
        requests("generate_until", [(prompt, limits) for prompt in prompts])
    )
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = [256, *prompt.encode()]
        for _ in range(6):
            row = torch.tensor([tokens])
            tokens.append(int(model(row, model.mask(None, *row.shape))[0, -1].argmax()))
        assert text == build_tokenizer(TokenizerName.bytes).decode(tokens[1 + len(prompt) :])
    stop = texts[0][2]
    (cut,) = harness.generate_until(
        requests("generate_until", [(prompts[0], {"until": stop, "max_gen_toks": 6})])
    )
    assert cut == texts[0][: texts[0].index(stop)]
    with pytest.raises(DataError, match="sampling is not had here"):
        harness.generate_until(requests("generate_until", [("a", {"do_sample": True})]))


def test_generation_keeps_room_for_what_it_writes_alone(model: Transformer) -> None:
    harness, sizes = HarnessModel(model, TrainedWords(build_tokenizer(TokenizerName.bytes)), 4), []
    make = harness.decoder.cache
    harness.decoder.cache = lambda batch, size: sizes.append(size) or make(batch, size)
    for prompt, tokens in (("a", 6), ("x" * 40, 6), ("x" * 40, 20)):
        harness.generate_until(
            requests("generate_until", [(prompt, {"until": [], "max_gen_toks": tokens})])
        )
    assert sizes == [2 + 6 - 1, 18 + 6 - 1, 24]  # the last of them writes until the context ends


def test_the_command_measures_our_tasks(model: Transformer, folder: Path, tasks: Path) -> None:
    settings = [
        f"run={folder}",
        f"downstream=[{','.join(TASKS)},sky]",
        f"tasks={tasks}",
        "batch=2",
        "threads=1",
    ]
    command = programs.run("eval.py", *settings, cwd=ROOT)
    assert command.returncode == 0, command.stderr
    report = json.loads((folder / "evaluation" / "step_000003.downstream.json").read_text())
    assert set(report["results"]) == {*TASKS, "sky"}
    assert report["results"]["sky"]["acc,none"] == report["results"]["own_choices"]["acc,none"]
    right = 0
    for document in QUESTIONS:
        scores = [
            directly(model, document["question"], choice)[0] for choice in document["choices"]
        ]
        right += scores.index(max(scores)) == document["answer"]
    assert report["results"]["own_choices"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    nats = sum(directly(model, "", document["question"])[0] for document in QUESTIONS)
    size = sum(len(document["question"]) for document in QUESTIONS)
    assert report["results"]["own_text"]["bits_per_byte,none"] == pytest.approx(
        -nats / math.log(2) / size, rel=1e-5
    )
    assert set(report["n-shot"].values()) == {0}
    assert all(name in command.stdout for name in ("own_choices", "bits_per_byte", "exact_match"))


def test_tasks_that_cannot_be_measured_are_refused(folder: Path, tasks: Path) -> None:
    def refused(**settings) -> str:
        with pytest.raises(ConfigError) as refusal:
            evaluate_tasks(parse(EvalConfig, {"run": str(folder), "tasks": str(tasks)} | settings))
        return str(refusal.value)

    with pytest.raises(ConfigError, match=r"own_choice is no task .* did you mean own_choices\?"):
        check_names(["own_choice", "own_text"], list(TASKS))
    assert "names no task" in refused(downstream=[])
    assert "tokens=5: has no use with downstream" in refused(downstream=["own_text"], tokens=5)
    assert "no such folder" in refused(downstream=["own_text"], tasks=f"{tasks}/none")
    assert "threads=-1: must be at least 1" in refused(downstream=["own_text"], threads=-1)
    with pytest.raises(ConfigError, match="must be a list of texts or null"):
        parse(EvalConfig, {"run": str(folder), "downstream": "own_text"})


def test_another_tokenizer_than_the_runs_is_refused(
    folder: Path, tasks: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(folder, tmp_path / "run")
    (run / "config.yaml").write_text(
        OmegaConf.to_yaml(OmegaConf.create(plain(composed("experiment=demo", "name=x")))) + END
    )
    (run / "identity.json").write_text('{"tokenizer": "another"}')
    with pytest.raises(
        RunError, match=r"tokenizer bytes is not the one .* the run that it was exported from names"
    ):
        evaluate_tasks(
            parse(EvalConfig, {"run": str(run), "tasks": str(tasks), "downstream": ["own_text"]})
        )


def test_a_converted_model_is_read_with_its_own_tokenizer(
    model: Transformer, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="it comes with transformers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 0, "?": 1, "a": 2, "b": 3}, unk_token="?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    write_model(
        tmp_path,
        model.config,
        model.state_dict(),
        "",
        tokenizer=None,
        separator=0,
        ends=[0, 3],
        step=0,
    )
    with pytest.raises(FolderError, match=r"tokenizer\.json: not there"):
        PretrainedWords(read_exported(tmp_path))
    words.save(str(tmp_path / "tokenizer.json"))
    plain = PretrainedWords(read_exported(tmp_path))
    assert (plain.opening, plain.prefix, plain.ends, plain.encode_for_task("a b c")) == (
        [],
        0,
        {0, 3},
        [2, 3, 1],
    )
    words.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 0)]
    )
    words.save(str(tmp_path / "tokenizer.json"))
    opened = PretrainedWords(read_exported(tmp_path))
    assert opened.opening == [0] and HarnessModel(model, opened, 1).tok_encode("a b") == [0, 2, 3]
    nameless = dataclasses.replace(read_exported(tmp_path), separator=None)
    with pytest.raises(FolderError, match="texts need a beginning"):
        PretrainedWords(nameless)
