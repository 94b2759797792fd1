"""Decoding with a cache gives the logits of one pass over the whole window."""

import pytest
import torch

from lrattnres.config import DepthConfig, QKNorm, RopeKind, RopeScaling, Routing
from lrattnres.data.packing import segments
from lrattnres.kernels import reference, stacked
from lrattnres.model.decoder import Decoder
from lrattnres.model.transformer import Transformer
from lrattnres.residual.base import paths
from tests.model import test_transformer

SEPARATOR = 30


def make(config, dtype: torch.dtype = torch.float32) -> Transformer:
    """Half as steep as over there: ten sub-layers that amplify rounding leave little of 1e-5."""
    model = test_transformer.make(config, dtype)
    for parameter in model.parameters():
        parameter.mul_(0.5)
    return model


def whole(model: Transformer, tokens: torch.Tensor, documents: bool = True) -> torch.Tensor:
    numbers = segments(tokens, SEPARATOR) if documents else None
    return model(tokens, model.mask(numbers, *tokens.shape))


def drawn(batch: int, length: int) -> torch.Tensor:
    """Tokens with a separator in front and some inside."""
    tokens = torch.randint(SEPARATOR, (batch, length))
    tokens[:, 0] = SEPARATOR
    tokens[torch.rand(batch, length) < 0.15] = SEPARATOR
    return tokens


ROUTINGS = [(name, None) for name in paths()] + [("s_lr", Routing.add), ("p_lr", Routing.add)]


@pytest.mark.parametrize(("residual", "routing"), ROUTINGS)
@pytest.mark.parametrize(("blocks", "two_phase"), [(None, False), (4, False), (4, True), (1, True)])
def test_token_by_token_equals_the_whole_window(
    tiny_model_config, residual, routing, blocks, two_phase
) -> None:
    """In float64: some paths amplify the rounding of float32 beyond any tolerance of use."""
    config = tiny_model_config(
        residual=residual, routing=routing, blocks=blocks, layers=5, context=24
    )
    model = make(config, torch.float64).double()
    decoder, tokens = Decoder(model, SEPARATOR, two_phase=two_phase), drawn(3, 24)
    cache = decoder.cache(3)
    found = torch.cat(
        [decoder.head(decoder.feed(cache, column)) for column in tokens.split(1, dim=1)], dim=1
    )
    torch.testing.assert_close(found, whole(model, tokens), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("residual", "blocks"), [("s_lr", 4), ("delta", None)])
def test_in_bfloat16_a_whole_model_decodes_to_its_rounding(
    tiny_model_config, residual, blocks
) -> None:
    model = make(
        tiny_model_config(residual=residual, blocks=blocks, layers=5, context=24),
        dtype=torch.bfloat16,
    )
    decoder, tokens = Decoder(model, SEPARATOR), drawn(3, 24)
    cache = decoder.cache(3)
    pieces = tokens.split([9, *[1] * 15], dim=1)
    found = torch.cat([decoder.head(decoder.feed(cache, piece)) for piece in pieces], dim=1).float()
    expected = whole(model, tokens).float()
    assert all(keys.dtype is torch.bfloat16 for keys in cache.keys.values())
    assert (found - expected).norm() < 2e-2 * expected.norm()


PRETRAINED = {
    "kv_heads": 1,
    "head_dim": 8,
    "gains": True,
    "qk_norm": QKNorm.gains,
    "norm_eps": 1e-6,
    "tied": True,
    "rope_scaling": RopeScaling(RopeKind.llama3, factor=4.0, first_context=8),
    "gate": True,
}


@pytest.mark.parametrize("residual", list(paths()))
@pytest.mark.parametrize(
    "options",
    [PRETRAINED, {"depth": DepthConfig(heads=2, learned_scale=True)}],
    ids=["pretrained", "ablated"],
)
def test_models_of_other_makes(tiny_model_config, residual, options) -> None:
    """As a converted model is, and with routing that no grouped read computes."""
    model = make(tiny_model_config(residual=residual, context=24, **options))
    decoder, tokens = Decoder(model, SEPARATOR), drawn(2, 24)
    cache = decoder.cache(2)
    found = torch.cat(
        [decoder.head(decoder.feed(cache, piece)) for piece in tokens.split([9, *[1] * 15], dim=1)],
        dim=1,
    )
    torch.testing.assert_close(found, whole(model, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residual", list(paths()))
@pytest.mark.parametrize("blocks", [None, 4])
@pytest.mark.parametrize("documents", [True, False])
def test_prompts_of_unequal_length(tiny_model_config, residual, blocks, documents) -> None:
    model = make(tiny_model_config(residual=residual, blocks=blocks, context=24))
    decoder, tokens = Decoder(model, SEPARATOR, documents=documents), drawn(4, 24)
    expected = whole(model, tokens, documents)
    counts = torch.tensor([1, 13, 7, 14])
    cache = decoder.cache(4)
    prompts = tokens[:, :14].clone()
    prompts[torch.arange(14) >= counts.unsqueeze(1)] = (
        SEPARATOR  # padding that would restart attention, if it were seen
    )
    hidden = decoder.feed(cache, prompts, counts)
    for row, count in enumerate(counts):
        torch.testing.assert_close(
            decoder.head(hidden[row, :count]), expected[row, :count], rtol=1e-5, atol=1e-5
        )
    for _ in range(10):
        next_tokens = tokens.gather(1, cache.lengths.unsqueeze(1))
        here = expected[torch.arange(4), cache.lengths]
        found = decoder.head(decoder.feed(cache, next_tokens))[:, 0]
        torch.testing.assert_close(found, here, rtol=1e-5, atol=1e-5)
    assert cache.lengths.max() == 24


def test_a_piece_may_have_any_length(tiny_model_config) -> None:
    model = make(tiny_model_config(residual="p_lr", context=24))
    decoder, tokens = Decoder(model, SEPARATOR), drawn(2, 24)
    cache = decoder.cache(2)
    found = torch.cat(
        [
            decoder.head(decoder.feed(cache, piece))
            for piece in tokens.split([5, 1, 9, 2, 1, 6], dim=1)
        ],
        dim=1,
    )
    torch.testing.assert_close(found, whole(model, tokens), rtol=1e-5, atol=1e-5)


def test_windows_can_be_chosen_from_a_cache(tiny_model_config) -> None:
    model = make(tiny_model_config(context=24))
    decoder, tokens = Decoder(model, SEPARATOR), drawn(3, 24)
    cache = decoder.cache(3)
    decoder.feed(cache, tokens[:, :11])
    rows = [2, 0, 2]
    found = decoder.head(decoder.feed(cache.select(rows), tokens[rows, 11:]))
    torch.testing.assert_close(found, whole(model, tokens)[rows, 11:], rtol=1e-5, atol=1e-5)


def test_the_context_is_the_limit(tiny_model_config) -> None:
    decoder = Decoder(make(tiny_model_config(context=12)), SEPARATOR)
    cache = decoder.cache(1)
    decoder.feed(cache, drawn(1, 12))
    with pytest.raises(ValueError, match="13 tokens in a cache of 12"):
        decoder.feed(cache, drawn(1, 1))
    with pytest.raises(ValueError, match="write 1 to 12"):
        decoder.cache(1, 13)


def test_weights_are_shared_and_the_model_stays_what_it_was(tiny_model_config) -> None:
    model = make(tiny_model_config())
    decoder = Decoder(model, SEPARATOR)
    before = whole(model, tokens := drawn(1, 12))
    assert decoder.head.weight.data_ptr() == model.head.weight.data_ptr()
    assert (
        decoder.one.router.queries.data_ptr()
        == decoder.many.router.queries.data_ptr()
        == model.router.queries.data_ptr()
    )
    decoder.feed(decoder.cache(1), tokens)
    assert torch.equal(whole(model, tokens), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "projected"), [(16, False), (4, False), (4, True)])
def test_stacked_reads_equal_the_reference(dtype, rank, projected) -> None:
    """Two phases: three queries over four sources, then a source that is completed by an addend."""
    values = [torch.randn(2, 1, 16).to(dtype) for _ in range(4)]
    keys = [torch.randn(2, 1, rank).to(dtype) for _ in range(4)] if projected else []
    queries, addend = torch.randn(3, rank), torch.randn(2, 1, 16).to(dtype)
    wide = [value.double() for value in values], [key.double() for key in keys]
    read = {"normalize": True, "passes": False}
    first, truth = (
        stacked.read(queries, values, keys, **read),
        reference.read(queries, *wide, **read),
    )
    newest = torch.randn(2, 1, 16).to(dtype)
    emitted = [torch.randn(2, 1, rank).to(dtype)] if projected else []
    second = stacked.read(queries[1:2], [newest], emitted, addend, [first.parts[0]], **read)
    doubles = [key.double() for key in emitted]
    true_second = reference.read(
        queries[1:2], [newest.double()], doubles, addend.double(), [truth.parts[0]], **read
    )
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for found, expected in ((first, truth), (second, true_second)):
        assert found.out.dtype is dtype
        torch.testing.assert_close(found.out.double(), expected.out, **close)
    torch.testing.assert_close(
        first.parts[1].mixture.double(), truth.parts[1].mixture, rtol=1e-5, atol=1e-5
    )
