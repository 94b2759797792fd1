"""What only a CUDA device can show: its attention kernels, and a whole training step. `make test-gpu`."""

import pytest
import torch

from lrattnres.model.attention import BACKENDS, choose_attention
from lrattnres.model.transformer import build_model
from lrattnres.residual.base import paths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", ["flash3", "flash", "varlen", "flex"])
def test_packed_kernels_agree_with_the_dense_mask(name: str, documents: bool) -> None:
    device = torch.device("cuda")
    if BACKENDS[name].obstacle(device, torch.bfloat16, True):
        pytest.skip(BACKENDS[name].obstacle(device, torch.bfloat16, True))
    parts = torch.randn(3, 2, 256, 4, 64, device=device).bfloat16().unbind(0)
    numbers = torch.zeros(2, 256, dtype=torch.int32)
    numbers[0, 100:] = 1
    results = []
    for backend in (BACKENDS["sdpa"], BACKENDS[name]):
        query, key, value = (part.detach().clone().requires_grad_() for part in parts)
        mask = backend.prepare(numbers if documents else None, 2, 256, device)
        out = backend.attend(query, key, value, mask)
        out.float().square().sum().backward()
        results.append((out, query.grad, key.grad, value.grad))
    for truth, found in zip(*results, strict=True):
        error = (found.float() - truth.float()).norm() / truth.float().norm()
        assert error < 2e-2


@pytest.mark.parametrize("residual", list(paths()))
def test_a_step_on_the_device_agrees_with_the_cpu(tiny_model_config, residual: str) -> None:
    config = tiny_model_config(residual=residual, dim=128, context=64)
    gradients = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        backend = choose_attention("sdpa", device, torch.float32, training=True)
        model = build_model(config, seed=0, device=device, attention=backend, dtype=torch.float32)
        tokens = torch.arange(64).remainder(31).repeat(2, 1).to(device)
        logits = model(tokens, model.mask(None, 2, 64))
        logits.logsumexp(-1).square().mean().backward()
        gradients.append([parameter.grad.cpu() for parameter in model.parameters()])
    for truth, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-5)
