"""The max-pool of bfloat16 pictures, compared with torch's."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch.nn import functional

from agents.networks import HalvingMaxPool
from agents.pooling import ParallelMaxPool, can_pool


def pictures(*shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)


def both(x):
    """Output and gradient of torch's pooling in float32, and of ours."""
    found = []
    for pool, given in ((lambda x: functional.max_pool2d(x, 3, 2, 1), x.float()),
                        (ParallelMaxPool.apply, x)):
        given = given.requires_grad_()
        pooled = pool(given)
        weights = pictures(*pooled.shape, seed=1).to(pooled.dtype)
        gradient, = torch.autograd.grad(pooled, given, weights)
        found.append((pooled.detach().to(torch.bfloat16), gradient.to(torch.bfloat16)))
    return found


@pytest.mark.parametrize("shape", [(2, 32, 16, 8), (1, 8, 2, 2), (5, 24, 4, 6)])
def test_same_numbers_as_torch(shape):
    x = pictures(*shape)
    assert can_pool(x)
    (expected, expected_gradient), (pooled, gradient) = both(x)
    assert pooled.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pooled, expected)
    # Both add in float32 and round once.
    assert torch.equal(gradient, expected_gradient)


def test_first_of_equal_values_gets_the_gradient():
    x = torch.randint(-1, 2, (4, 16, 12, 12), generator=torch.Generator().manual_seed(2))
    (expected, expected_gradient), (pooled, gradient) = both(
        x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last))
    assert torch.equal(pooled, expected) and torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("value", ["nan", "-nan", "inf"])
def test_values_that_are_no_numbers(value):
    x = pictures(1, 8, 6, 6)
    # A processor's own NaN is negative, which float() cannot say.
    number = (torch.tensor(-0x40, dtype=torch.int16).view(torch.bfloat16) if value == "-nan"
              else torch.tensor(float(value), dtype=torch.bfloat16))
    x[0, 0, 2, 3] = number
    x[0, 1] = number
    assert np.signbit(x[0, 0, 2, 3].float().item()) == value.startswith("-")
    expected = functional.max_pool2d(x.float(), 3, 2, 1).to(torch.bfloat16)
    torch.testing.assert_close(ParallelMaxPool.apply(x), expected, equal_nan=True, rtol=0, atol=0)


def test_network_uses_it_where_it_can_and_torch_elsewhere():
    pool = HalvingMaxPool()
    for x in (pictures(2, 16, 8, 8), pictures(2, 16, 8, 8).float(), pictures(2, 12, 8, 8),
              pictures(2, 16, 8, 8).contiguous()):
        name = pool(x.requires_grad_()).grad_fn.name()
        assert ("ParallelMaxPool" in name) == can_pool(x)
        assert torch.equal(pool(x), functional.max_pool2d(x, 3, 2, 1))
    assert [can_pool(pictures(2, 16, 8, 8)), can_pool(pictures(2, 16, 8, 8).float()),
            can_pool(pictures(2, 12, 8, 8)), can_pool(pictures(2, 16, 8, 8).contiguous()),
            can_pool(pictures(2, 16, 7, 8))] == [True, False, False, False, False]


def test_number_of_threads_stays():
    """In a process of its own, because numba sets the number only when it first runs."""
    code = ("import torch; torch.set_num_threads(1); from agents.pooling import ParallelMaxPool; "
            "ParallelMaxPool.apply(torch.zeros(2, 8, 4, 4, dtype=torch.bfloat16)); import numba; "
            "print(numba.threading_layer(), torch.get_num_threads(), numba.get_num_threads())")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                          env=dict(os.environ, OMP_NUM_THREADS="2"))
    assert done.stdout.split()[1:] == ["1", "1"], done.stderr
