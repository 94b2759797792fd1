"""What every residual path must do, whoever wrote it: one test each over the table of paths."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lrattnres.config import AC, Compile
from lrattnres.config.checks import resolve
from lrattnres.distributed.parallel import AC_MODES
from lrattnres.model.decoder import Decoder
from lrattnres.model.transformer import Transformer, initialize
from lrattnres.optim.groups import assign
from lrattnres.residual.base import path_of, paths, pattern_of
from lrattnres.residual.coefficients import Traced
from lrattnres.residual.cost import cost
from lrattnres.residual.probe import DepthProbe
from tests.config.test_config import composed
from tests.residual.making import config_of

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
every_path = pytest.mark.parametrize("residual", list(paths()))


def model_of(
    residual: str,
    *,
    drawn: bool = True,
    blocks: int | None = 3,
    layers: int = 3,
    dim: int = 8,
    dtype: torch.dtype = torch.float64,
) -> Transformer:
    """A small model; drawn: with every parameter of the path away from its start."""
    config = config_of(residual, blocks, layers=layers, dim=dim)
    config = path_of(config).settled(config)[0]
    model = Transformer(config).to(dtype)
    model.dtype = dtype
    initialize(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not name.startswith("router."):
            parameter.data.mul_(5)  # else everything is nearly linear
    for parameter in model.router.parameters() if drawn else ():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(0.5 * noise)
    return model


def logits_of(model: Transformer) -> torch.Tensor:
    return model(TOKENS, model.mask(None, *TOKENS.shape))


def outcome(model: Transformer) -> list[torch.Tensor]:
    logits = logits_of(model)
    return [logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))]


@every_path
def test_each_parameter_has_a_role_and_an_owner(residual: str) -> None:
    model = model_of(residual)
    names = [name for name, _ in model.router.named_parameters()]
    assert {pattern_of(name) for name in names} == set(model.roles())
    owned = assign(model.named_parameters(remove_duplicate=False), model.roles())
    for owner, pairs in owned.items():
        for name, _ in pairs:
            if name.startswith("router."):
                assert model.roles()[pattern_of(name.removeprefix("router."))].owner == owner


@every_path
def test_it_starts_as_it_says(residual: str) -> None:
    """bits: the logits of the baseline; scaled: every read is the baseline's, but for the norm's epsilon."""
    # In float32 a product with some rows of a matrix has the bits of that with all of them.
    sizes = {"dim": 32, "dtype": torch.float32}
    model, plain = (model_of(name, drawn=False, **sizes) for name in (residual, "baseline"))
    rows = model.config.dim
    state = plain.state_dict()
    for name, value in model.state_dict().items():
        if name in state:
            cut = value[:rows] if name.endswith("output.weight") else value
            state[name][: len(cut)].copy_(cut)
    start = path_of(model.config).start
    if start == "bits":
        assert torch.equal(logits_of(model), logits_of(plain))
    elif start == "scaled":
        torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-3, atol=1e-4)
    else:
        assert start == "other"
        assert not torch.allclose(logits_of(model), logits_of(plain), rtol=1e-2)


@every_path
def test_gradients_are_those_of_finite_differences(residual: str) -> None:
    """Of the path alone: the embedding and every output are inputs, and every parameter is one."""
    path = model_of(residual).router
    generator = torch.Generator().manual_seed(2)
    names = [name for name, _ in path.named_parameters()]
    widths = [path.dim, *[path.dim + path.emit_dim] * 6]
    outputs = [torch.randn(2, width, generator=generator, dtype=torch.float64) for width in widths]
    heads = torch.randn(3, 2, 2, 2, 4, generator=generator, dtype=torch.float64)  # raw, by block
    leaves = [*outputs, heads, *(parameter.detach() for parameter in path.parameters())]

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.path = path

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            *outputs, heads = inputs
            state, found = path.begin(outputs[0]), []
            for site, output in enumerate(outputs[1:]):
                found += [part for part in path.read(state, site) if part is not None]
                raw = None
                change = path.change(state, site)
                if change and site % 2 == 0:
                    key, value = heads[site // 2]
                    own = path.value_site(path.config, site) == site
                    raw = (key, value if own else None)
                    found += change(*raw)
                state = path.write(state, site, output, raw)
            return (*found, path.read(state, len(outputs) - 1).x)

    reads = Reads()

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip([f"path.{name}" for name in names], inputs[8:], strict=True))
        return torch.func.functional_call(reads, given, inputs[:8])

    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True, atol=1e-6)


@every_path
def test_decoding_in_pieces_is_the_whole_pass(residual: str) -> None:
    model = model_of(residual)
    decoder = Decoder(model, separator=10, documents=False)
    cache = decoder.cache(2)
    pieces = [decoder.feed(cache, part) for part in TOKENS.split([4, 2, 1, 1], dim=1)]
    with torch.no_grad():
        torch.testing.assert_close(
            decoder.head(torch.cat(pieces, 1)), logits_of(model), rtol=1e-9, atol=1e-10
        )


@pytest.mark.parametrize("ac", [AC.selective, AC.full])
@every_path
def test_recomputation_changes_nothing(residual: str, ac: AC) -> None:
    model = model_of(residual)
    plain = outcome(model)
    AC_MODES[ac](model)
    assert all(torch.equal(a, b) for a, b in zip(outcome(model), plain, strict=True))


@every_path
def test_coefficients_give_h_back(residual: str) -> None:
    """h_t = Σ c_{t,i} o_i with the outputs that the model really wrote, for each token."""
    model = model_of(residual)
    outputs, states = [], []

    class Recorded(Traced):
        def begin(self, embedding):
            outputs.append(embedding)
            return super().begin(embedding)

        def write(self, state, site, output, raw=None):
            outputs.append(output[..., : self.path.dim])
            return super().write(state, site, output, raw)

    traced = Recorded(model.router.definition())
    with torch.no_grad():
        logits = model(
            TOKENS,
            model.mask(None, *TOKENS.shape),
            lambda site, state: states.append((site, state)),
            traced,
        )
        torch.testing.assert_close(logits, logits_of(model), rtol=1e-10, atol=1e-11)
        if not model.router.linear:
            return
        for site, state in states:
            row = traced.coefficients(state, site)
            assert row.shape[-1] == site + 1
            row = row.expand(*TOKENS.shape, -1)
            mixed = sum(
                row[..., i : i + 1] * output for i, output in enumerate(outputs[: site + 1])
            )
            torch.testing.assert_close(mixed, traced.hidden(state, site), rtol=1e-9, atol=1e-10)


@every_path
def test_the_probe_has_a_row_for_every_site(residual: str) -> None:
    model = model_of(residual)
    probe = DepthProbe(model.router, trace=True)
    with torch.no_grad():
        model(TOKENS, model.mask(None, *TOKENS.shape), probe, probe.path)
    results = probe.results()
    assert ("coefficients" in results) == model.router.linear
    rows = results.get("coefficients", [[0] * site for site in range(1, 8)])
    assert [len(row) for row in rows] == list(range(1, 8))
    assert all(map(torch.isfinite, map(torch.tensor, results["hidden_norm"])))
    attends = [row is not None for row in results["mean_weight"]]
    assert attends == [site > 0 and model.router.attends for site in range(7)]
    if residual == "baseline":
        assert all(weight == 1 for row in rows for weight in row)


@pytest.mark.parametrize("blocks", [None, 3])
@every_path
def test_cost_is_what_is_there(residual: str, blocks: int | None) -> None:
    config = config_of(residual, blocks)
    config = path_of(config).settled(config)[0]
    with torch.device("meta"):
        model = Transformer(config)
    assert cost(config).model_parameters == sum(p.numel() for p in model.parameters())


@every_path
def test_carried_is_what_a_state_holds(residual: str) -> None:
    """While a sub-layer runs, a few numbers a token aside; a softmax counts the head's site too."""
    model, most = model_of(residual, blocks=None), 0
    attends, least = model.router.attends, 0 if model.router.attends else model.config.dim

    def held(site: int, state) -> None:
        nonlocal most
        parts = {id(part): part for part in tree_leaves(state) if isinstance(part, torch.Tensor)}
        wide = [part.numel() / TOKENS.numel() for part in parts.values()]
        if attends or site < len(model.sublayers):
            most = max(most, sum(count for count in wide if count >= least))

    with torch.no_grad():
        model(TOKENS, model.mask(None, *TOKENS.shape), held)
    assert most == cost(model.config).added.carried


@every_path
def test_it_compiles_into_one_graph(residual: str) -> None:
    model = model_of(residual, blocks=2, layers=1)
    expected = logits_of(model)
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-10, atol=1e-11)


@every_path
def test_settings_without_a_meaning_are_recorded_as_none(residual: str) -> None:
    """`path=NAME` alone is a command: what configs/ says for other paths is dropped, and said."""
    inside = paths()[residual].__module__.startswith("lrattnres.")  # else its yaml is elsewhere
    choice = f"path={residual}" if inside else f"model.residual={residual}"
    words = ["experiment=demo", choice, "name=x", "device=cpu"]
    config, notes = resolve(composed(*words))
    assert config.model.residual == residual and config.compile is Compile.off
    for name in ("rank", "blocks"):
        said = any(note.startswith(f"model.{name} has no meaning") for note in notes)
        assert said == (name not in path_of(config.model).uses)
    assert resolve(config) == (config, [])
