"""The Triton kernels against float64 autograd of the reference: interpreted on a CPU, compiled on a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from lrattnres import depth_attention
from lrattnres.config import Routing
from lrattnres.kernels import ops, reference
from lrattnres.kernels.backends import KERNELS, choose_kernels
from lrattnres.residual.base import ResidualPath, path_of
from tests.paths import ROOT
from tests.residual.making import config_of, make_together
from tests.residual.making import run as reads_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close(found: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    if not truth.any():  # the query of a single source has no gradient
        assert found.abs().max() < 10 * TOLERANCE[dtype]
        return
    error = (found.double() - truth).norm() / truth.norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.1e}"


def inputs(
    sources: int, tokens: int, dim: int, rank: int, dtype: torch.dtype, separate: bool
) -> list[Tensor]:
    """query, values, keys"""
    # Logits of that spread. The output is saved as it is rounded, so in bfloat16 ⟨g, v⟩ − ⟨g, h⟩ loses digits where one
    # source has nearly all the weight, and a handful of tokens may all be like that.
    query = (2 if dtype is torch.float32 else 1) * torch.randn(rank) / rank**0.5
    values = [torch.randn(tokens, dim).to(dtype) for _ in range(sources)]
    keys = [torch.randn(tokens, rank).to(dtype) for _ in range(sources)] if separate else []
    return [query.to(DEVICE), *(x.to(DEVICE) for x in (*values, *keys))]


def run(
    kernels: str, leaves: list[Tensor], sources: int, probe: Tensor, normalize: bool
) -> list[Tensor]:
    """The read and every gradient."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    query, values, keys = leaves[0], leaves[1 : sources + 1], leaves[sources + 1 :]
    out = depth_attention(query, values, keys or None, normalize=normalize, kernels=kernels)
    return [out, *torch.autograd.grad((out * probe.to(out.dtype)).sum(), leaves)]


WIDE = [
    pytest.param(3, 5, dim, rank, marks=pytest.mark.slow)
    for dim, rank in ((1024, 1000), (4096, 4096), (7186, 32), (7186, 7186))
]
MANY = [pytest.param(n, 64, 96, 8, marks=pytest.mark.slow) for n in (17, 33, 49, 73)]
SHAPES = [(1, 3, 96, 96), (2, 130, 96, 60), (9, 64, 96, 8), (2, 40, 1000, 40), (2, 5, 4096, 33)]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("sources", "tokens", "dim", "rank"), [*SHAPES, *MANY, *WIDE])
def test_plain_reads(
    sources: int,
    tokens: int,
    dim: int,
    rank: int,
    separate: bool,
    dtype: torch.dtype,
    normalize: bool,
) -> None:
    leaves = inputs(sources, tokens, dim, rank, dtype, separate)
    probe = torch.randn(tokens, dim, device=DEVICE)
    truth = run("reference", [leaf.double() for leaf in leaves], sources, probe.double(), normalize)
    for found, expected in zip(
        run("triton", leaves, sources, probe, normalize), truth, strict=True
    ):
        close(found, expected, dtype)


def reads(path: ResidualPath, outputs: list[Tensor]) -> list[Tensor]:
    width = path.dim + path.emit_dim
    return reads_of(
        path, [outputs[0][..., : path.dim], *(each[..., :width] for each in outputs[1:])]
    )


CASES = [("attn_res", None), ("s_lr", None), ("p_lr", None), ("delta", None), ("p_lr", Routing.add)]


LOW = pytest.param(torch.bfloat16, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize(
    ("blocks", "starts"),
    [(None, (0, 1, 4)), (3, (0, 3)), (4, (0, 4)), (2, None), (1, (0,)), (3, tuple(range(9)))],
)
@pytest.mark.parametrize(("name", "routing"), CASES)
def test_reads_in_groups(
    name: str, routing: Routing | None, blocks: int | None, starts, dtype: torch.dtype
) -> None:
    """Any grouping of any granularity, with inputs that are slices of wider tensors, against the plain reads."""
    config = config_of(name, blocks, dim=24, rank=5, routing=routing)
    router, truth = make_together(config, "triton", starts), path_of(config)(config).double()
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    truth.load_state_dict(router.state_dict())
    outputs = [torch.randn(2, 32, 31).to(dtype) for _ in range(9)]
    probes = [torch.randn(2, 32, 24) for _ in range(9)]
    results = []
    for model, cast in ((router, dtype), (truth, torch.float64)):
        leaves = [output.to(cast).to(DEVICE).requires_grad_() for output in outputs]
        found = reads(model.to(DEVICE), leaves)
        loss = sum(
            (read.double() * probe.to(DEVICE)).sum()
            for read, probe in zip(found, probes, strict=True)
        )
        results.append([*found, *torch.autograd.grad(loss, [*leaves, *model.parameters()])])
    for found, expected in zip(*results, strict=True):
        close(found, expected, dtype)


def test_gradients_are_the_same_bits_every_time() -> None:
    leaves, probe = (
        inputs(5, 300, 96, 8, torch.bfloat16, False),
        torch.randn(300, 96, device=DEVICE),
    )
    for first, second in zip(
        run("triton", leaves, 5, probe, True), run("triton", leaves, 5, probe, True), strict=True
    ):
        assert torch.equal(first, second)


def test_sources_may_lie_beyond_2_31_elements() -> None:
    """Rows 2³⁰ elements apart: only the pages that are touched take memory."""
    stride = 2**30 + 64
    memory = torch.empty(2 * stride + 32, dtype=torch.bfloat16)
    far = memory.as_strided((3, 32), (stride, 1))
    far.copy_(torch.randn(3, 32))
    near, query, probe = torch.randn(3, 32).bfloat16(), torch.randn(8), torch.randn(3, 32)
    results = []
    for kernels, cast in (("triton", lambda x: x), ("reference", torch.Tensor.double)):
        leaves = [cast(query).requires_grad_(), cast(near).requires_grad_()]
        source = (
            far.detach().requires_grad_() if kernels == "triton" else far.double().requires_grad_()
        )
        out = depth_attention(leaves[0], [leaves[1], source], kernels=kernels)
        results.append([out, *torch.autograd.grad((out.double() * probe).sum(), [*leaves, source])])
    for found, expected in zip(*results, strict=True):
        close(found, expected, torch.bfloat16)


def test_inputs_of_any_layout() -> None:
    values = [
        torch.randn(96, 2, 5).permute(1, 2, 0),
        torch.randn(2, 5, 192)[..., ::2],
        torch.randn(5, 2, 96).transpose(0, 1),
    ]
    query = torch.randn(8)
    truth = depth_attention(
        query.double(), [value.double() for value in values], kernels="reference"
    )
    found = depth_attention(
        query.to(DEVICE), [value.to(DEVICE) for value in values], kernels="triton"
    )
    assert found.shape == (2, 5, 96)
    close(found.cpu(), truth, torch.float32)
    empty = depth_attention(query.to(DEVICE), [torch.empty(0, 96, device=DEVICE)], kernels="triton")
    assert empty.shape == (0, 96)


def test_a_nearly_one_hot_softmax_and_huge_logits_stay_finite() -> None:
    leaves = inputs(3, 4, 96, 8, torch.float32, False)
    leaves[0] = leaves[0] * 1e4
    for found in run("triton", leaves, 3, torch.randn(4, 96, device=DEVICE), True):
        assert found.isfinite().all()


def test_the_operators_keep_the_rules_of_torch() -> None:
    query, *values = inputs(3, 4, 96, 8, torch.float32, False)
    queries = torch.stack([query, -query])
    addend, part, part_stats = torch.randn(4, 96), torch.randn(4, 96), torch.randn(2, 4)
    forward = (
        queries,
        values,
        [],
        addend.to(DEVICE),
        [part.to(DEVICE)],
        [part_stats.to(DEVICE)],
        True,
    )
    torch.library.opcheck(torch.ops.lrattnres.read.default, forward)
    wide, stats, scalars = torch.ops.lrattnres.read(*forward)
    later = [torch.randn_like(wide[0])], [torch.stack([stats[1][0], torch.randn(4, device=DEVICE)])]
    backward = (
        [wide[0], *later[0]],
        wide[0],
        values,
        [],
        queries,
        later[1],
        stats[0],
        scalars,
        [None, *values[:2]],
        [],
        True,
        True,
    )
    torch.library.opcheck(torch.ops.lrattnres.read_backward.default, backward)


def test_what_the_kernels_do_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"it takes float32 and bfloat16.*write kernels="):
        choose_kernels("triton", DEVICE, torch.float16, compiled=False)
    mixed = [torch.zeros(2, 8, device=DEVICE), torch.zeros(2, 8, device=DEVICE).bfloat16()]
    with pytest.raises(ValueError, match="bfloat16"):
        ops.read(torch.zeros(1, 4, device=DEVICE), mixed, normalize=True, passes=False)


@pytest.mark.parametrize("kernels", [*KERNELS, "auto"])
@pytest.mark.parametrize(
    ("values", "keys", "message"),
    [
        ([torch.zeros(2, 8), torch.zeros(3, 8)], None, r"values: \(3, 8\)"),
        (
            [torch.zeros(2, 8), torch.zeros(1, 8)],
            None,
            r"values: \(1, 8\)",
        ),  # torch would broadcast it
        ([torch.zeros(2, 3)], None, "queries of width 4.*between 1 and 3"),
        ([torch.zeros(())], None, r"values of shape \(\)"),
        ([torch.zeros(2, 8)], [torch.zeros(2, 5)], r"keys: \(2, 5\)"),
        ([torch.zeros(2, 8)], [], "write one query"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_every_backend(
    values, keys, message: str, kernels: str
) -> None:
    with pytest.raises(ValueError, match=message):
        depth_attention(torch.zeros(4), values, keys, kernels=kernels)


def test_without_gpu_and_interpreter_triton_is_refused_and_auto_is_torch() -> None:
    program = """
import torch
from lrattnres.kernels.backends import choose_kernels
print([choose_kernels("auto", torch.device("cpu"), torch.float32, compiled=c).name for c in (False, True)])
choose_kernels("triton", torch.device("cpu"), torch.float32, compiled=False)
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert process.stdout.strip() == "['reference', 'compiled']"
    assert "kernels=triton: it needs a CUDA GPU, or TRITON_INTERPRET=1" in process.stderr
    assert "write kernels=auto or kernels=reference" in process.stderr


@pytest.mark.parametrize("sources", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_compiled_reads_are_the_reference(sources: int) -> None:
    leaves, probe = (
        inputs(sources, 6, 32, 4, torch.float32, False),
        torch.randn(6, 32, device=DEVICE),
    )
    truth = run("reference", [leaf.double() for leaf in leaves], sources, probe.double(), True)
    for found, expected in zip(run("compiled", leaves, sources, probe, True), truth, strict=True):
        close(found, expected, torch.float32)


def test_nothing_of_full_width_is_kept_but_sources_and_the_read() -> None:
    """A finished read, and every unfinished one, keep scalars only: mixtures are not saved."""
    queries, (_, *values) = (
        torch.randn(4, 8, requires_grad=True),
        inputs(3, 4, 96, 8, torch.float32, False),
    )
    values = [value.requires_grad_() for value in values]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        reading = ops.read(queries.to(DEVICE), values, normalize=True, passes=False)
        more = ops.read(
            queries[1:2].to(DEVICE),
            [torch.randn_like(values[0])],
            parts=reading.parts[:1],
            normalize=True,
            passes=False,
        )
    wide = {x.data_ptr() for x in kept if x.shape[-1] == 96 and x.dim() == 2}
    known = {x.data_ptr() for x in (*values, reading.out, more.out)}
    assert len(wide - known) == 1  # the newest source of the second read
    assert reading.parts[0].mixture.data_ptr() not in wide
    assert (
        reference.EPSILON == 2.0**-23
        and choose_kernels("triton", DEVICE, torch.bfloat16, compiled=False).grouped
    )
