"""Other packages' reads, called by what their signatures say: stand-ins with the same signatures, computed in plain torch."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from lrattnres import depth_attention
from tests.paths import ROOT


@pytest.fixture
def rivals(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import rivals

    return rivals


def mixed(
    values: torch.Tensor,
    query: torch.Tensor,
    gain: torch.Tensor | float,
    eps: float,
    scale: float = 1.0,
) -> torch.Tensor:
    keys = values[..., -query.shape[0] :].float()
    logits = (F.rms_norm(keys, keys.shape[-1:], eps=eps) * gain) @ query.float() * scale
    return (logits.softmax(0).unsqueeze(-1) * values.float()).sum(0)


def fused_attnres(
    query,
    residuals,
    rms_weight,
    output_rms_weight=None,
    rms_eps=1e-6,
    scale=1.0,
    return_weights=False,
    checkpoint_level=1,
):  # of fla-core 0.6.0
    out = mixed(torch.stack(list(residuals)), query, rms_weight, rms_eps, scale)
    return F.rms_norm(out, out.shape[-1:], output_rms_weight, rms_eps).to(residuals[0].dtype)


def liger_attn_res(V, w_query, w_norm, eps: float = 1e-6):  # of liger-kernel 0.8.5
    assert V.dim() == 4
    return mixed(V, w_query, w_norm, eps).to(V.dtype)


def attnres(values, query, *, eps=2.0**-23, scale=1.0):  # of fast-attnres 2.1.0
    assert query.dtype == torch.bfloat16
    return mixed(torch.stack(values), query, 1.0, eps, scale).to(values[0].dtype)


STAND_INS = {"fla-core": fused_attnres, "liger-kernel": liger_attn_res, "fast-attnres": attnres}


@pytest.mark.parametrize("name", list(STAND_INS))
def test_each_is_asked_for_what_ours_computes(rivals, monkeypatch, name: str) -> None:
    rival = rivals.RIVALS[name]
    module = types.ModuleType(rival.module)
    setattr(module, rival.function, STAND_INS[name])
    monkeypatch.setitem(sys.modules, rival.module, module)
    values = [torch.randn(5, 16).bfloat16() for _ in range(3)]
    query = torch.randn(rival.rank(4, 16)).to(rival.query)
    truth = depth_attention(
        query.double(), [value.double() for value in values], normalize=True, kernels="reference"
    )
    assert (rival.load()(query, values) - truth).norm() < 1e-2 * truth.norm()

    setattr(module, rival.function, lambda values: values)
    with pytest.raises(TypeError, match="argument"):
        rival.load()


def test_what_is_not_installed_is_not_compared(rivals) -> None:
    assert rivals.installed(torch.device("cpu")) == []
