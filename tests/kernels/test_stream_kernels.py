"""The Triton kernels of streams against the float64 definition: interpreted on a CPU, compiled on a
GPU.
"""

import pytest
import torch
from torch import Tensor

from lrattnres.config import AC
from lrattnres.distributed.parallel import AC_MODES
from lrattnres.kernels.backends import KERNELS, choose_kernels
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import ResidualPath, path_of
from tests.residual.making import config_of
from tests.residual.making import run as reads_of

pytest.importorskip("triton")

from lrattnres.kernels import stream_ops
from lrattnres.residual.fused.streams import InTriton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}


def error(found: Tensor, truth: Tensor) -> float:
    """Relative, in the norm of all numbers."""
    return ((found.double() - truth).norm() / truth.norm().clamp(min=1e-12)).item()


def pair(residual: str, dim: int, **options) -> tuple[ResidualPath, ResidualPath]:
    """The path in Triton with drawn parameters, and its definition in float64."""
    config = config_of(residual, layers=2, dim=dim, rank=None, path=options)
    path = path_of(config).build(config, KERNELS["triton"])
    assert isinstance(path, InTriton)
    for parameter in path.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    truth = path_of(config).build(config, KERNELS["reference"]).double()
    assert not isinstance(truth, InTriton)
    truth.load_state_dict(path.state_dict())
    return path.to(DEVICE), truth.to(DEVICE)


def results(path: ResidualPath, outputs: list[Tensor], probes: list[Tensor]) -> list[Tensor]:
    """Every read, and the gradients of the outputs and the parameters."""
    leaves = [output.detach().requires_grad_() for output in outputs]
    reads = reads_of(path, leaves)
    loss = sum((read.double() * probe).sum() for read, probe in zip(reads, probes, strict=True))
    return [*reads, *torch.autograd.grad(loss, [*leaves, *path.parameters()])]


def same(residual: str, dim: int, tokens: tuple[int, ...], dtype: torch.dtype, **options) -> None:
    """What the definition makes in that dtype sets the scale of what may be lost."""
    path, truth = pair(residual, dim, **options)
    outputs = [torch.randn(*tokens, dim, device=DEVICE).to(dtype) for _ in range(5)]
    probes = [torch.randn(*tokens, dim, device=DEVICE) for _ in range(5)]
    exact = results(truth, [output.double() for output in outputs], probes)
    plain = results(path.definition(), outputs, probes)
    for found, other, expected in zip(results(path, outputs, probes), plain, exact, strict=True):
        allowed = TOLERANCE[dtype] + 3 * error(other, expected)
        assert error(found, expected) < allowed, (error(found, expected), allowed)


CASES = [
    ("hc", {}),
    ("mhc", {"n": 3, "iterations": 3, "head": "sum", "projections": "muon"}),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("hc", {"norm": "rms"}),
            ("hc", {"tanh": False, "n": 2}),
            ("hc", {"n": 1}),
            ("mhc", {}),
        )
    ],
]


LOW = pytest.param(torch.bfloat16, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize(("residual", "options"), CASES)
def test_reads_and_gradients_are_those_of_the_definition(residual, options, dtype) -> None:
    same(residual, 40, (2, 21), dtype, **options)


@pytest.mark.parametrize(
    ("residual", "dim", "tokens"),
    [("mhc", 8, 3), pytest.param("hc", 136, 1, marks=pytest.mark.slow)],
)
def test_any_width_and_number_of_tokens(residual: str, dim: int, tokens: int) -> None:
    same(residual, dim, (tokens,), torch.float32)


@pytest.mark.parametrize("residual", ["hc", "mhc"])
def test_more_tokens_than_one_program_sums(residual: str, monkeypatch) -> None:
    monkeypatch.setattr(stream_ops, "SPAN", 32)
    same(residual, 24, (70,), torch.float32)


@pytest.mark.parametrize("joint", [False, True])
def test_products_of_bfloat16_lose_little(joint: bool) -> None:
    """Streams to which nothing is written are exact; what is lost is of the maps and gradients."""
    streams = [torch.randn(70, 40, device=DEVICE).bfloat16().requires_grad_() for _ in range(3)]
    output = torch.randn(70, 40, device=DEVICE).bfloat16()
    maps = torch.randn(3 if joint else 1, 5, 40, device=DEVICE, requires_grad=True)
    write = torch.zeros(70, 3, device=DEVICE)
    found = stream_ops.project(streams, write, output, maps, joint=joint)
    exact = [stream.detach().double().requires_grad_() for stream in streams]
    wide = maps.detach().double().requires_grad_()
    each = [stream @ w.mT for stream, w in zip(exact, wide.expand(3, -1, -1), strict=True)]
    products = sum(each) if joint else torch.stack(each, -2)
    assert error(found.products, products) < 2e-5
    assert error(found.squares, torch.stack([s.square().sum(-1) for s in exact], -1)) < 1e-6
    probe = torch.randn(products.shape, device=DEVICE)
    made = torch.autograd.grad((found.products * probe).sum(), [maps, *streams])
    truth = torch.autograd.grad((products * probe).sum(), [wide, *exact])
    assert error(made[0], truth[0]) < 2e-5
    for gradient, expected in zip(made[1:], truth[1:], strict=True):
        assert error(gradient, expected) < 5e-3  # as it is rounded


@pytest.mark.slow
def test_the_operators_keep_the_rules_of_torch() -> None:
    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE)

    streams, write, output = [some(2, 5, 24) for _ in range(2)], some(2, 5, 2), some(2, 5, 24)
    mixing, upstream = some(2, 5, 2, 3), [some(2, 5, 24) for _ in range(3)]
    operators = torch.ops.lrattnres
    for joint, products in ((False, some(2, 5, 2, 4)), (True, some(2, 5, 4))):
        maps = some(2 if joint else 1, 4, 24)
        sites = (streams, write, output)
        for operator, arguments in (
            (operators.stream_products, (*sites, maps, joint)),
            (operators.stream_mix, (*sites, mixing)),
            (operators.mixing_gradient, (upstream, *sites)),
            (
                operators.stream_gradients,
                (upstream, mixing, *sites, maps, products, some(2, 5, 2), joint),
            ),
            (operators.map_gradient, (*sites, products, 4, joint)),
        ):
            torch.library.opcheck(operator.default, arguments)


def models(residual: str, ac: str = "none", **options) -> tuple[Transformer, Transformer]:
    """With kernels and without, of the same parameters, which are drawn."""
    config = config_of(residual, layers=2, dim=24, rank=None, path=options)
    built = [
        build_model(
            config,
            seed=0,
            device=DEVICE,
            attention=BACKENDS["sdpa"],
            dtype=torch.float32,
            kernels=KERNELS[kernels],
            prepare=lambda model: AC_MODES[AC[ac]](model),
        )
        for kernels in ("triton", "reference")
    ]
    for parameter in built[0].router.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    built[1].load_state_dict(built[0].state_dict())
    return built[0], built[1]


def outcome(model: Transformer) -> list[Tensor]:
    """Logits, and the gradient of every parameter."""
    tokens = torch.arange(16, device=DEVICE).view(2, 8) % 11
    logits = model(tokens, model.mask(None, *tokens.shape))
    return [logits, *torch.autograd.grad(logits.logsumexp(-1).sum(), list(model.parameters()))]


@pytest.mark.parametrize("ac", ["none", "full"])
@pytest.mark.parametrize("residual", ["hc", pytest.param("mhc", marks=pytest.mark.slow)])
def test_a_model_with_kernels_is_the_model(residual: str, ac: str) -> None:
    kernels, reference = models(residual, ac)
    for found, truth in zip(outcome(kernels), outcome(reference), strict=True):
        assert error(found, truth.double()) < 3e-4


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["hc", "mhc"])
def test_a_compiled_model_is_one_graph_and_the_same(residual: str) -> None:
    torch._dynamo.reset()
    kernels, reference = models(residual, iterations=3) if residual == "mhc" else models(residual)
    kernels.compile(fullgraph=True)
    for found, truth in zip(outcome(kernels), outcome(reference), strict=True):
        assert error(found, truth.double()) < 3e-4


def test_what_is_kept_are_the_streams_the_output_and_scalars() -> None:
    path, _ = pair("hc", 96)
    kept: list[Tensor] = []
    state = path.begin(torch.randn(5, 96, device=DEVICE))
    outputs = [torch.randn(5, 96, device=DEVICE) for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        after = path.write(path.write(state, 0, outputs[0]), 1, outputs[1])
    wide = {x.data_ptr() for x in kept if x.shape == (5, 96)}
    between = 4  # the streams that the first site left and the second took
    assert len(wide) == len({x.data_ptr() for x in (*state.streams, *outputs)}) + between
    assert not wide & {x.data_ptr() for x in (*after.streams, after.hidden)}


def test_gradients_are_the_same_bits_every_time() -> None:
    path, _ = pair("hc", 24)
    outputs = [torch.randn(9, 24, device=DEVICE) for _ in range(5)]
    first, second = (results(path, outputs, outputs) for _ in range(2))
    assert all(torch.equal(*both) for both in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("path", "name"), [({"n": 5}, "model.path.n=5"), ({"dynamic": False}, "model.path.dynamic")]
)
def test_what_the_kernels_do_not_compute_is_refused(path: dict, name: str) -> None:
    config = config_of("hc", rank=None, path=path)
    beyond = path_of(config).beyond_kernels(config)
    with pytest.raises(ValueError, match=f"does not compute {name}.*write kernels=auto"):
        choose_kernels("triton", DEVICE, torch.float32, compiled=False, beyond=beyond)
    with pytest.raises(ValueError, match="one dtype and shape"):
        a, b = torch.zeros(2, 8), torch.zeros(2, 8).bfloat16()
        stream_ops.project([a], torch.zeros(2, 1), b, torch.zeros(1, 2, 8), joint=False)
