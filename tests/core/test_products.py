"""The step between two layers' attention: right against torch in fp32, and the same for a row wherever it stands."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import silu

from rm_core import kernels
from rm_core.fused_training import Products
from rm_core.llama_layers import Projection

EPS = 1e-5


@pytest.fixture(scope="module")
def library():
    try:
        return kernels.load()
    except kernels.NoKernelsError as error:
        pytest.skip(f"no compiled kernels here: {error}")


class Sizes:
    """A layer with random weights. H hidden, I intermediate, ``heads`` Q D, ``width`` (Q + 2K) D."""

    def __init__(self, hidden, heads, intermediate, width, has_bias, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        shapes = {
            "out": (hidden, heads),
            "gate_up": (2 * intermediate, hidden),
            "down": (hidden, intermediate),
            "qkv": (width, hidden),
        }
        self.weights = {name: self.random(*shape, scale=shape[1] ** -0.5).bfloat16() for name, shape in shapes.items()}
        self.biases = {name: self.random(shape[0]).bfloat16() if has_bias else None for name, shape in shapes.items()}
        self.norms = [1 + 0.1 * self.random(hidden) for _ in range(2)]
        self.hidden, self.heads, self.intermediate, self.width = hidden, heads, intermediate, width

    def random(self, *shape, scale=1.0):
        return torch.randn(*shape, generator=self.generator) * scale

    def rows(self, count):
        return self.random(count, self.heads).bfloat16(), self.random(count, self.hidden)

    def compute(self, library, attended, residual, chunk, threads, *, is_first=False, is_last=False):
        residual, qkv = residual.clone(), torch.full((len(residual), self.width), 7.0, dtype=torch.bfloat16)
        packed = torch.empty(sum(weight.numel() for weight in self.weights.values()), dtype=torch.bfloat16)
        width = max(self.hidden, self.heads) + self.intermediate
        chunks = torch.empty((threads, chunk, width), dtype=torch.bfloat16)
        products = {name: kernels.Product.of(self.weights[name], self.biases[name]) for name in self.weights}
        out, gate_up, down, after = (ctypes.byref(products[name]) for name in ("out", "gate_up", "down", "qkv"))
        library.decoder_rows(
            *residual.shape, None if is_first else attended.data_ptr(), residual.data_ptr(), out,
            self.norms[0].data_ptr(), gate_up, down, EPS, self.norms[1].data_ptr(), EPS, None if is_last else after,
            qkv.data_ptr(), packed.data_ptr(), chunks.data_ptr(), chunk, threads,
        )  # fmt: skip
        return residual, qkv

    def expected(self, attended, residual, *, is_first=False):
        """In fp32, rounded to bf16 only where a product's input is."""
        if not is_first:
            residual = residual + self.product("out", attended.float())
            gate, up = self.product("gate_up", self.norm(residual, 0)).chunk(2, dim=1)
            residual = residual + self.product("down", (silu(gate) * up).bfloat16().float())
        return residual, self.product("qkv", self.norm(residual, 1))

    def norm(self, x, which):
        scale = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + EPS)
        return (x * scale * self.norms[which]).bfloat16().float()

    def product(self, name, x):
        bias = self.biases[name]
        return x @ self.weights[name].float().t() + (0.0 if bias is None else bias.float())


def assert_close(found, expected, tolerance):
    error = (found.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < tolerance
    assert (found.float() - expected).abs().max() < 20 * tolerance * expected.abs().max()


# hidden, heads, intermediate, width; 1376 inputs are three parts, of which the last is shorter
SIZES = [(64, 128, 96, 256), (96, 64, 1376, 64), (704, 64, 32, 96), (576, 576, 1536, 960)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("count", "chunk", "threads"), [(1, 32, 1), (33, 32, 2), (31, 32, 2), (100, 64, 2), (65, 96, 3)]
)
def test_it_is_what_torch_computes_in_fp32(library, sizes, has_bias, count, chunk, threads):
    layer = Sizes(*sizes, has_bias)
    attended, residual = layer.rows(count)
    found, qkv = layer.compute(library, attended, residual, chunk, threads)
    expected, expected_qkv = layer.expected(attended, residual)
    # Sums of a product in another order may fall on the other side of a rounding of the next one's input.
    assert_close(found, expected, 1e-3)
    assert_close(qkv, expected_qkv, 4e-3)


def test_the_first_layer_has_no_attention_before_it_and_the_last_none_behind_it(library):
    layer = Sizes(64, 128, 96, 256, has_bias=True)
    attended, residual = layer.rows(40)
    found, qkv = layer.compute(library, attended, residual, 32, 1, is_first=True)
    assert torch.equal(found, residual)
    assert_close(qkv, layer.expected(attended, residual, is_first=True)[1], 4e-3)
    found, qkv = layer.compute(library, attended, residual, 32, 1, is_last=True)
    assert_close(found, layer.expected(attended, residual)[0], 1e-3)
    assert (qkv == 7.0).all(), "nothing is written where nothing is wanted"


@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_does_not_depend_on_the_others_its_place_or_the_threads(library, sizes):
    layer = Sizes(*sizes, has_bias=True)
    attended, residual = layer.rows(150)
    expected = layer.compute(library, attended, residual, 320, 1)
    for start, end, chunk, threads in [
        (0, 150, 64, 2),
        (7, 8, 32, 1),
        (7, 60, 32, 2),
        (100, 150, 64, 3),
        (5, 20, 32, 4),
    ]:
        found = layer.compute(
            library, attended[start:end].contiguous(), residual[start:end].contiguous(), chunk, threads
        )
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y[start:end])


def test_fewer_threads_than_asked_for_do_all_of_the_work(library):
    """As where OMP_THREAD_LIMIT forbids more."""
    layer = Sizes(64, 128, 96, 256, has_bias=True)
    attended, residual = layer.rows(100)
    expected = layer.compute(library, attended, residual, 32, 1)
    program = (
        "import torch\n"
        "from rm_core import kernels\n"
        "from tests.core.test_products import Sizes\n"
        "layer = Sizes(64, 128, 96, 256, has_bias=True)\n"
        "print(layer.compute(kernels.load(), *layer.rows(100), 32, 3)[1].double().sum().item())\n"
    )
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) == expected[1].double().sum().item()


def test_a_row_that_is_not_finite_stays_alone(library):
    layer = Sizes(64, 128, 96, 256, has_bias=False)
    attended, residual = layer.rows(70)
    expected = layer.compute(library, attended, residual, 32, 2)
    residual[33, 5], attended[40, 3] = float("nan"), float("inf")
    for found, clean in zip(layer.compute(library, attended, residual, 32, 2), expected, strict=True):
        others = [row for row in range(70) if row not in (33, 40)]
        assert torch.equal(found[others], clean[others])
        assert not found[33].isfinite().any()
        assert not found[40].isfinite().all()


@pytest.mark.parametrize("has_adapter", [True, False])
@pytest.mark.parametrize("is_gate_up", [False, True])
@pytest.mark.parametrize(
    ("count", "inputs", "outputs", "ranks", "threads"),
    [(1, 64, 96, 32, 1), (150, 1376, 64, 64, 2), (20, 96, 704, 32, 3)],
)
def test_a_layer_with_an_adapter_and_its_gradients(
    library, has_adapter, is_gate_up, count, inputs, outputs, ranks, threads
):
    torch.manual_seed(0)
    x = torch.randn(count, inputs * (2 if is_gate_up else 1)).bfloat16()
    weight, bias = (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16(), torch.randn(outputs).bfloat16()
    a, b = (torch.randn(ranks, inputs) * inputs**-0.5).bfloat16(), (torch.randn(outputs, ranks) * 0.1).bfloat16()
    grad = torch.randn(count, outputs).bfloat16()
    adapter = (a, b) if has_adapter else (None, None)
    multiplied = x.float()
    if is_gate_up:
        gate, up = multiplied.chunk(2, dim=1)
        multiplied = (silu(gate) * up).bfloat16().float()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        products = Products(library)
        out, inner = products.forward(x, Projection(weight, bias), *adapter, is_gate_up)
        grad_x, grad_inner = products.backward(grad, Projection(weight, bias), *adapter)
        expected = multiplied @ weight.float().t() + bias.float()
        expected_grad = grad.float() @ weight.float()
        if has_adapter:
            assert_close(inner, multiplied @ a.float().t(), 4e-3)
            expected = expected + inner.float() @ b.float().t()
            assert_close(grad_inner, grad.float() @ b.float(), 4e-3)
            expected_grad = expected_grad + grad_inner.float() @ a.float()
            found = products.adapter_gradient(inner, grad)
            assert_close(found, inner.float().t() @ grad.float(), 1e-5)
        assert_close(out, expected, 4e-3)
        assert_close(grad_x, expected_grad, 4e-3)
    finally:
        torch.set_num_threads(threads_before)
