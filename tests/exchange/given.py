"""Pretrained folders as others write them: random weights by transformers, and a tokenizer of their
own.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<s>", "</s>", "<x>"]
TEXT = ["the router reads what every layer wrote before it, and mixes keys"] * 9
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def byte_level(template: str | None = None) -> Tokenizer:
    """As Llama 3 and Qwen have it; the tokens of SPECIAL are 0, 1 and 2."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=290, special_tokens=SPECIAL, initial_alphabet=letters),
    )
    if template:
        made.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(name, SPECIAL.index(name)) for name in SPECIAL]
        )
    return made


def sentence_piece() -> Tokenizer:
    """As Llama 2 has it, with bytes for what is no word."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<x>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=[*SPECIAL, *fallback])
    made.train_from_iterator(TEXT, trainer)
    tree = json.loads(made.to_str())  # the trainer calls them special, and no model does
    tree["added_tokens"] = tree["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(tree))
    made.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return made


def pretrained(path: Path, tokenizer: Tokenizer | None = None, family="Llama", **changes):
    """Makes a model far from uniform in the folder `path`; returns it as transformers has it."""
    import transformers

    rows = 1 + max(tokenizer.get_vocab().values()) if tokenizer else 67
    tokens = {"vocab_size": rows, "bos_token_id": 0, "eos_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**SIZES | tokens | changes)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
        write(path / "tokenizer_config.json", bos_token="<s>", eos_token="</s>")
    return model.eval()


def write(file: Path, **changes) -> None:
    """Sets keys of a JSON file; None takes one out."""
    tree = (json.loads(file.read_text()) if file.exists() else {}) | changes
    if file.name == "tokenizer_config.json":
        tree.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))
