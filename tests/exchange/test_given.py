"""Facts that several files of a pretrained model state: those of transformers, or a refusal."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lrattnres
from lrattnres.config import EvalConfig
from lrattnres.config.commands import ConvertConfig, GenerateConfig, InspectConfig
from lrattnres.entry import settings
from lrattnres.evaluation.load import load_run
from lrattnres.exchange.convert import convert
from lrattnres.exchange.folder import FolderError
from lrattnres.generation.run import generate_run
from lrattnres.report.inspection import inspect_run

transformers = pytest.importorskip("transformers", reason="it makes the models that are converted")

from tests.exchange.given import byte_level, pretrained, sentence_piece, write  # noqa: E402

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def converted(source: Path) -> tuple[Path, str]:
    """The folder that a conversion to the plain stream makes, and what it says on the way."""
    out, said = source.with_name("out"), []
    shutil.rmtree(out, ignore_errors=True)
    words = [f"source={source}", f"out={out}", "model.residual=baseline"]
    convert(settings(ConvertConfig, words), said.append)
    return out, "\n".join(said)


def theirs(source: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(source).eval()


@torch.no_grad()
def assert_same_logits(source: Path) -> str:
    """The converted model against transformers, which reads the same folder."""
    out, said = converted(source)
    tokens, ours = torch.arange(40)[None] % 60, lrattnres.load(out)
    expected = theirs(source)(tokens).logits
    assert expected.abs().max() > 1
    found = ours(tokens, ours.mask(None, *tokens.shape))
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)
    return said


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "given"


def change_weights(folder: Path, **tensors: torch.Tensor) -> None:
    names = {"head": HEAD, "embedding": EMBEDDING}
    weights = load_file(folder / WEIGHTS) | {names[key]: part for key, part in tensors.items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_head_of_its_own_is_kept_though_it_is_called_tied(source, family: str) -> None:
    model = pretrained(source, family=family, tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.detach()
    change_weights(source, head=embedding.clone())
    assert assert_same_logits(source) == ""
    assert lrattnres.load(source.with_name("out")).config.tied
    change_weights(source, head=torch.randn(embedding.shape))
    assert "lm_head.weight has values of its own" in assert_same_logits(source)


def test_of_one_file_and_shards_the_one_file_counts(source) -> None:
    pretrained(source)
    other = source.with_name("other")
    torch.manual_seed(5)
    pretrained(other, initializer_range=0.1).save_pretrained(other / "shards", max_shard_size="9KB")
    torch.manual_seed(6)
    weights = {key: torch.randn_like(part) for key, part in load_file(other / WEIGHTS).items()}
    save_file(weights, source / WEIGHTS, {"format": "pt"})
    for file in (other / "shards").glob("model*"):
        shutil.copyfile(file, source / file.name)
    assert INDEX in assert_same_logits(source)


def test_an_index_that_does_not_agree_with_its_shards_is_refused(source) -> None:
    model = pretrained(source)
    (source / WEIGHTS).unlink()
    model.save_pretrained(source, max_shard_size="9KB")
    assert assert_same_logits(source) == ""
    first, *_, last = sorted(source.glob("model-*.safetensors"))
    whole, text = load_file(last), (source / INDEX).read_text()
    name = next(iter(load_file(first)))
    for change, said in (
        ({"extra": torch.ones(2)}, "extra: in no file by the index"),
        ({name: load_file(first)[name]}, f"{name}: in {last.name} and {first.name}"),
    ):
        save_file(whole | change, last, {"format": "pt"})
        with pytest.raises(FolderError, match=said):
            converted(source)
    save_file(whole, last, {"format": "pt"})
    (source / INDEX).write_text(text.replace(first.name, last.name, 1))
    with pytest.raises(FolderError, match="does not agree with the shards"):
        converted(source)
    (source / INDEX).write_text(text.replace(first.name, f"../{first.name}"))
    with pytest.raises(FolderError, match="must name a file for each tensor"):
        converted(source)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e3, "rope_parameters": None},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": None},
        {
            "rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3},
            "rope_parameters": {"type": "linear", "factor": 4.0, "rope_theta": 5e3},
        },
        {
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}, "rope_theta": 1e4},
        {"rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 4.0}},
        {
            "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32},
            "original_max_position_embeddings": 16,
        },
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_rotary_settings_in_two_places_are_those_of_transformers_or_refused(
    source, changes
) -> None:
    pretrained(source)
    write(source / "config.json", **changes)
    try:
        assert_same_logits(source)
    except FolderError as refusal:
        assert any(word in str(refusal) for word in ("do not agree", "beside it", "must be 1.0"))


def test_what_is_no_model_alone_is_refused(source) -> None:
    pretrained(source, byte_level("<s> $A"))
    write(source / "adapter_config.json", r=4)
    with pytest.raises(FolderError, match=r"adapter_config\.json: an adapter changes these"):
        converted(source)
    (source / "adapter_config.json").unlink()
    write(source / "config.json", transformers_weights="other.safetensors")
    with pytest.raises(
        FolderError, match=r"transformers_weights='other\.safetensors': must be None"
    ):
        converted(source)
    write(source / "config.json", transformers_weights=None, num_hidden_layers="2")
    with pytest.raises(FolderError, match="num_hidden_layers='2': must be a number above 0"):
        converted(source)
    write(source / "config.json", num_hidden_layers=2, vocab_size=280)
    with pytest.raises(FolderError, match=r"its tokenizer has token 289, and .* vocab_size=280"):
        converted(source)
    write(source / "config.json", vocab_size=290)
    change_weights(source, embedding=torch.ones(290, 32, dtype=torch.int8))
    with pytest.raises(FolderError, match=r"embed_tokens\.weight is torch\.int8, quantised"):
        converted(source)


def greedy(model, tokens: list[int], count: int) -> list[int]:
    """What transformers writes, ends as its generation settings say."""
    row = torch.tensor([tokens])
    return model.generate(
        row,
        attention_mask=torch.ones_like(row),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )[0, len(tokens) :].tolist()


def generated(folder: Path, *words: str) -> dict:
    target = io.StringIO()
    config = settings(GenerateConfig, [f"run={folder}", "temperature=0", "json=true", *words])
    generate_run(config, io.StringIO(), target)
    return json.loads(target.getvalue())


@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "both"])
def test_every_end_that_a_file_names_ends_a_text(source, where: str) -> None:
    tokenizer = byte_level("<s> $A")
    prompt = tokenizer.encode("the router").ids
    model = pretrained(source, tokenizer)
    written = greedy(model, prompt, 16)
    end = next(token for token in written if token != written[0])
    count = written.index(end) + 1
    assert len(written) == 16 and count < 16
    named = {"config.json": 1, "generation_config.json": 1}
    for file in named:
        several = [1, end] if where in (file, "both") else 1
        write(source / file, eos_token_id=several)
    if where != "config.json":  # transformers asks the other file only where this one is not there
        assert greedy(theirs(source), prompt, 16) == written[:count]
    out, said = converted(source)
    assert (f"any of the tokens [1, {end}]" in said) == (where != "both")
    for file in named:
        assert json.loads((out / file).read_text())["eos_token_id"] == [1, end]
    record = generated(out, "prompt=the router", "tokens=16")
    assert (record["tokens"], record["finish"]) == (count, "end")
    assert record["text"] == tokenizer.decode(written[: count - 1], skip_special_tokens=False)
    assert load_run(EvalConfig(str(out)), print).words.ends == {1, end}


def test_settings_of_generation_stay_beside_the_model(source) -> None:
    pretrained(source, byte_level())
    write(
        source / "generation_config.json",
        temperature=0.6,
        do_sample=True,
        cache_implementation="static",
    )
    out, _ = converted(source)
    kept = json.loads((out / "generation_config.json").read_text())
    assert (kept["temperature"], kept["do_sample"], kept["use_cache"]) == (0.6, True, False)
    assert "cache_implementation" not in kept


TOKENIZERS = {
    "as it stands": (byte_level, {}),
    "a beginning more": (byte_level, {"add_bos_token": True}),
    "another class": (byte_level, {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None}),
    "added tokens": (
        byte_level,
        {
            "added_tokens_decoder": {"290": {"content": "<new>", "special": True, "lstrip": False,
                "rstrip": False, "normalized": False, "single_word": False}},
        },
    ),
    "no beginning": (sentence_piece, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}),
    "both": (
        sentence_piece,
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_is_what_transformers_makes_of_its_files(source, name: str) -> None:
    """In the converted folder tokenizer.json alone says it all, and transformers reads the same."""
    make, changes = TOKENIZERS[name]
    pretrained(source, tokenizer := make(), vocab_size=400)
    write(source / "tokenizer_config.json", **changes, chat_template="{{ messages }}")
    expected = transformers.AutoTokenizer.from_pretrained(source)
    out, said = converted(source)
    words = load_run(EvalConfig(str(out)), print).words
    again = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    changed = False
    for text in ("the router reads 1234 it's\n\n é e\u0301", "<new>the", "a"):
        whole = expected(text)["input_ids"]
        bare = expected(text, add_special_tokens=False)["input_ids"]
        assert words.encode_for_task(text) == bare
        assert whole[: len(words.opening) + len(bare)] == words.opening + bare
        assert again(text)["input_ids"] == whole
        assert words.decode(bare) == expected.decode(bare)
        changed |= tokenizer.encode(text).ids != whole
    assert changed == (name in ("another class", "added tokens"))
    noted = "tokenizer_config.json changes" in said
    assert noted if changed else not noted or make is sentence_piece
    assert again.chat_template == expected.chat_template == "{{ messages }}"
    assert (again.bos_token_id, again.eos_token_id) == (
        expected.bos_token_id,
        expected.eos_token_id,
    )
    first = expected.bos_token_id
    assert words.prefix == (expected.eos_token_id if first is None else first)


def test_a_beginning_that_the_tokenizer_names_counts_before_that_of_the_config(source) -> None:
    pretrained(source, byte_level(), bos_token_id=2)
    out, said = converted(source)
    assert "of the tokens that begin a text, [0, 2" in said
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 0


TEMPLATES = {
    "<s> $A": [0],
    "$A </s>": [],
    "<s> $A </s>": [0],
    None: [],
    "<s> <x> $A": [0, 2],
    "<s> <x> $A </s> <x>": [0, 2],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_only_what_stands_before_a_text_opens_it(source, template: str | None) -> None:
    pretrained(source, byte_level(template))
    words = load_run(EvalConfig(str(converted(source)[0])), print).words
    assert (words.opening, words.prefix) == (TEMPLATES[template], 0)
    assert words.encode("<s>a") != [0, *words.encode("a")]  # nothing in a prompt is special
    assert words.encode_for_task("<s>a") == [0, *words.encode_for_task("a")]


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_a_converted_model_is_continued_and_looked_into(source, tmp_path, make) -> None:
    """Greedy text against transformers; α needs a model that routes."""
    tokenizer = make()
    model = pretrained(source, tokenizer)
    out, _ = converted(source)
    for prompt in ("the router é ", ""):
        tokens = tokenizer.encode(prompt).ids or [0]
        written = greedy(model, tokens, 12)
        record = generated(out, f"prompt={prompt}", "tokens=12")
        whole = tokenizer.decode([*tokens, *written])
        assert len(written) == record["tokens"] == 12
        if "�" not in whole:  # which the package makes of more bytes than are broken
            assert prompt + record["text"] == whole
    words = [f"source={source}", f"out={tmp_path}/routed", "model.residual=delta"]
    convert(settings(ConvertConfig, words), print)
    look = settings(InspectConfig, [f"run={tmp_path}/routed", "text=the é", f"out={tmp_path}/look"])
    record = json.loads((inspect_run(look, io.StringIO()) / "reads.json").read_text())
    assert [entry["token"] for entry in record["tokens"]] == tokenizer.encode("the é").ids
    assert "".join(entry["text"] for entry in record["tokens"]).endswith("the \\xc3\\xa9")


def test_rows_that_no_token_has_are_not_written(source) -> None:
    """The model would write nothing else: its head points there."""
    tokenizer = byte_level()
    pretrained(source, tokenizer, vocab_size=300)
    head = torch.zeros(300, 32)
    head[290:] = 9 * torch.sign(torch.randn(32))
    change_weights(source, head=head + 0.1 * torch.randn(300, 32))
    words = load_run(EvalConfig(str(converted(source)[0])), print).words
    allowed = words.allowed(300)
    assert allowed.nonzero().flatten().tolist() == list(range(290))
    scores = theirs(source)(torch.tensor([tokenizer.encode("the").ids])).logits[0, -1]
    assert scores.argmax() >= 290
    record = generated(source.with_name("out"), "prompt=the", "tokens=1", "end=false")
    assert record["text"] == words.decode([int(scores[:290].argmax())])
