"""The kernel as it is laid out; LOCAL_KERNELS=gsd-kernels/gsd-kernels=FOLDER tries one that is not on the Hub yet."""

import pytest
import torch
from kernels import get_kernel

kernel = get_kernel("gsd-kernels/gsd-kernels", version=1)
pytestmark = pytest.mark.kernels_ci


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def texts(request, device):
    """Queries of the last 70 of 200 positions, keys and values, and a mask of padding on the left."""
    torch.manual_seed(0)
    sizes = ((3, 6, 70, 64), (3, 2, 200, 64), (3, 2, 200, 64))
    mask = torch.arange(200) >= torch.tensor([0, 33, 150])[:, None]
    return [torch.randn(size).to(device, request.param) for size in sizes], mask.to(device)


def test_a_row_has_the_same_bits_alone_and_in_a_batch(texts):
    tensors, mask = texts
    together = kernel.attention(None, *tensors, mask)[0]
    for b, start in enumerate([0, 33, 150]):
        own = max(0, start - 130)  # rows before it are padding
        q, k, v = (t[b : b + 1] for t in tensors)
        alone = kernel.attention(None, q[:, :, own:], k[:, :, start:], v[:, :, start:])[0]
        assert torch.equal(together[b, own:], alone[0])
        assert not together[b, :own].any()


def test_it_is_attention(texts):
    (q, k, v), mask = texts
    causal = torch.arange(200, device=mask.device) <= torch.arange(130, 200, device=mask.device)[:, None]
    visible = causal & mask[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    expected = torch.where(mask[:, None, 130:, None], expected, 0)
    out = kernel.attention(None, q, k, v, mask)[0].transpose(1, 2)
    torch.testing.assert_close(out, expected, atol=2e-2 if q.dtype != torch.float32 else 1e-5, rtol=2e-2)


def test_the_layer_is_a_product_of_rows(device):
    if device != "cpu":
        pytest.skip("it is for CPUs")
    linear, x = torch.nn.Linear(64, 48), torch.randn(5, 7, 64)
    with torch.no_grad():
        out = kernel.layers.Linear.forward(linear, x)
        assert torch.equal(out[2, 3], kernel.layers.Linear.forward(linear, x[2:3, 3:4])[0, 0])
        torch.testing.assert_close(out, linear(x))


@pytest.mark.parametrize("step", [1, 77])
def test_a_row_has_the_same_bits_in_whatever_pieces_its_text_comes(step, device):
    if device != "cpu":
        pytest.skip("rows of a GPU are the same in any batch, not in any pieces")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 600, 128).bfloat16() for heads in (6, 2, 2))
    whole = kernel.attention(None, q, k, v)[0]
    ends = [*range(step, 600, step), 600]
    pieces = [
        kernel.attention(None, q[:, :, begin:end], k[:, :, :end], v[:, :, :end])[0]
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    assert torch.equal(torch.cat(pieces, 1), whole)
