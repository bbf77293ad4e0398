import torch
import torch.nn.functional as F

from depthlm.kernels.functions import rms_norm


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rms_norm_equals_pytorch():
    x, weight, grad = random(3, 5, 8), random(8, seed=1), random(3, 5, 8, seed=2)
    assert torch.autograd.gradcheck(rms_norm, (x.requires_grad_(), weight.requires_grad_(), 1e-5))
    results = []
    for function in (rms_norm, lambda x, w, eps: F.rms_norm(x, (8,), w, eps)):
        inputs = [t.detach().float().requires_grad_() for t in (x, weight)]
        y = function(*inputs, 1e-5)
        results.append((y, *torch.autograd.grad(y, inputs, grad.float())))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rms_norm_computes_in_fp32():
    x, weight = random(64, 256).bfloat16(), torch.ones(256)
    expected = F.rms_norm(x.float(), (256,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected.bfloat16(), rtol=2**-7, atol=0)
