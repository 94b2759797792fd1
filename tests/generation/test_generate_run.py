"""scripts/generate.py: what it writes, from a terminal and between pipes, and what it refuses."""

import io
import json
import signal
import subprocess
import sys

import pytest
import torch

from lrattnres.config import ConfigError, EvalConfig
from lrattnres.config.commands import GenerateConfig
from lrattnres.data.packing import segments
from lrattnres.entry import manual, settings
from lrattnres.evaluation.load import load_run
from lrattnres.generation.run import generate_run
from lrattnres.runs.folder import RunError
from tests.paths import ROOT
from tests.programs import ENVIRONMENT, Program

SCRIPT = str(ROOT / "scripts" / "generate.py")


def generated(trained, *words: str, standard_input: str = "") -> str:
    target = io.StringIO()
    generate_run(
        settings(GenerateConfig, [f"run={trained}", *words]), io.StringIO(standard_input), target
    )
    return target.getvalue()


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_greedy_text_is_that_of_the_whole_pass(trained) -> None:
    """The end-of-text token stands in front of the prompt, and its spelling inside a prompt is
    plain text.
    """
    run = load_run(EvalConfig(str(trained)), print)
    prompt = "the <|endoftext|> r"
    tokens = [256, *prompt.encode()]
    for _ in range(12):
        window = torch.tensor([tokens])
        tokens.append(
            int(
                run.model(window, run.model.mask(segments(window, 256), *window.shape))[
                    0, -1
                ].argmax()
            )
        )
    found = generated(trained, f"prompt={prompt}", "temperature=0", "tokens=12", "end=false")
    assert found == run.words.decode(tokens[len(prompt) + 1 :]) + "\n"


def test_one_text_alone_is_the_same_text_among_many(trained) -> None:
    prompts = ["the router", "", "reads 50% of $HOME, ${all}: 'x'", "???"]
    together = records(
        generated(
            trained,
            "prompt=-",
            "lines=true",
            "json=true",
            "batch=3",
            standard_input="\n".join(prompts),
        )
    )
    assert [record["prompt"] for record in together] == prompts
    for record in together:
        assert generated(trained, f"prompt={record['prompt']}") == record["text"] + "\n"
        assert (
            generated(trained, f"prompt={record['prompt']}", "echo=true")
            == record["prompt"] + record["text"] + "\n"
        )
    # The context is 48: 49 tokens with the last one, of which the prompt and its separator take
    # some.
    for record in together:
        assert record["finish"] == "end" or record["tokens"] == 49 - 1 - len(
            record["prompt"].encode()
        )


def test_samples_and_seeds(trained) -> None:
    words = ["prompt=the", "json=true", "samples=3", "tokens=20"]
    first, again, other = (
        records(generated(trained, *words, *seed)) for seed in ([], ["seed=0"], ["seed=1"])
    )
    assert first == again and len({record["text"] for record in first + other}) == 6
    assert [record["sample"] for record in first] == [0, 1, 2]
    assert generated(trained, "prompt=the", "tokens=20") == first[0]["text"] + "\n"


def test_stop_texts_end_and_are_left_out(trained) -> None:
    whole = records(generated(trained, "prompt=the ", "json=true", "seed=2", "end=false"))[0]
    stop = whole["text"][9:12]
    cut = records(
        generated(
            trained,
            "prompt=the ",
            "json=true",
            "seed=2",
            "end=false",
            "stop=\x00never",
            f"stop={stop}",
        )
    )[0]
    assert cut["text"] == whole["text"].split(stop)[0] and cut["finish"] == "stop"
    assert cut["tokens"] < whole["tokens"]


def test_refusals_name_the_key_and_what_to_write(trained) -> None:
    with pytest.raises(ConfigError) as refusal:
        settings(
            GenerateConfig,
            ["run=x", "two words", "tmperature=1", "tokens=many", "seed=1", "seed=2"],
        )
    faults = str(refusal.value)
    assert all(
        word in faults
        for word in (
            "two words: must be key=value",
            "did you mean temperature",
            "tokens=many",
            "seed=2",
        )
    )
    assert "prompt: not set; write prompt=" in faults
    with pytest.raises(ConfigError) as refusal:
        generated(
            trained,
            "prompt=x",
            "top_k=0",
            "top_p=1.5",
            "temperature=0",
            "stop=",
            "json=true",
            "echo=true",
            "samples=2",
        )
    faults = str(refusal.value)
    assert all(
        word in faults
        for word in ("top_k=0", "top_p=1.5", "stop=", "echo=true", "samples=2: has no use")
    )
    with pytest.raises(ConfigError, match="write tokens=44"):
        generated(trained, "prompt=1234", "tokens=100")
    with pytest.raises(ConfigError, match=r"prompt 2: a prompt of 61 tokens[^\n]*context of 48"):
        generated(trained, "prompt=-", "lines=true", standard_input="fits\n" + 60 * "x" + "\n")
    with pytest.raises(ConfigError, match="there is no line"):
        generated(trained, "prompt=-", "lines=true")
    with pytest.raises(ConfigError, match="not UTF-8"):
        generated(trained, "prompt=\udcff")
    with pytest.raises(RunError, match="no such folder"):
        generated(f"{trained}x", "prompt=x")


def test_another_tokenizer_is_refused(trained, tmp_path) -> None:
    (tmp_path / "checkpoints").symlink_to(trained / "checkpoints")
    (tmp_path / "config.yaml").write_text((trained / "config.yaml").read_text())
    (tmp_path / "identity.json").write_text('{"tokenizer": "another"}')
    with pytest.raises(RunError, match="tokenizer bytes is not the one"):
        generated(tmp_path, "prompt=x")


def test_a_model_that_diverged_is_refused(trained, monkeypatch) -> None:
    monkeypatch.setattr(
        "lrattnres.model.decoder.Decoder.feed",
        lambda self, cache, tokens, counts: torch.full((1, 2, 16), torch.nan),
    )
    with pytest.raises(RunError, match="not finite"):
        generated(trained, "prompt=x")


def test_values_are_texts_and_numbers_of_yaml() -> None:
    config = settings(
        GenerateConfig,
        ["run=a=b", "prompt=[1, 2", "temperature=1e-1", "top_k=null", "lines=true", "stop=null"],
    )
    assert (config.run, config.prompt, config.temperature, config.lines) == (
        "a=b",
        "[1, 2",
        0.1,
        True,
    )
    assert (config.top_k, config.stop) == (None, ["null"])
    config = settings(
        GenerateConfig,
        ["run=x", "prompt=0010", "step=000200", "top_p=00.50", "seed=0", "tokens=010"],
    )
    assert (config.prompt, config.step, config.top_p, config.seed, config.tokens) == (
        "0010",
        200,
        0.5,
        0,
        10,
    )
    assert "  temperature=1.0 " in manual(GenerateConfig, "x") and "  seed=0 " in manual(
        GenerateConfig, "x"
    )


@pytest.mark.slow
def test_between_pipes(trained) -> None:
    """Bytes in, bytes out, the text as it grows; a reader that leaves ends the writer without a
    word.
    """
    words = [SCRIPT, f"run={trained}", "prompt=-", "threads=1", "end=false", "echo=true"]
    prompt = "naïve\r\n €".encode()
    process = subprocess.run(
        [sys.executable, *words],  # encodings are an interpreter's own
        input=prompt,
        capture_output=True,
        env=ENVIRONMENT | {"LC_ALL": "C"},
        timeout=120,
    )
    assert process.returncode == 0 and process.stdout.startswith(prompt), process.stderr
    assert process.stderr.count(b"\n") == 1 and b"float32" in process.stderr
    words += ["lines=true", "samples=500", "batch=2"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Program(words, **pipes) as writer:
        writer.stdin.write(50 * b"the\n")
        writer.stdin.close()
        assert writer.stdout.read(1) == b"t"
        writer.stdout.close()
        said = writer.stderr.read()
        assert writer.wait(120) == -signal.SIGPIPE, said
    assert said.count(b"\n") == 1
