"""Matrix products in split bfloat16: exact products on tensor cores, added up in float32.

A float32 number is the sum of three bfloat16 numbers, x = hi + mid + lo with 8 bits each, and the product of two bfloat16
numbers is exact in float32. A product of float32 matrices is then a sum of bfloat16 products, of which those below the
rounding of float32 are left out: with three terms six of nine remain, and what is lost is at most 2⁻²³ of |x||y|; with two
terms three remain, and at most 3·2⁻¹⁶ is lost. Under bfloat16 autocast activations and output gradients have one term
already, and norms take one product.

What is not exact is the sum. Tensor cores add up in float32 but cut off instead of rounding (Fasi, Higham, Mikaitis and
Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021): errors of long sums of one sign add up, and norms come out too
small. Sums are therefore taken in pieces of ``DEPTH`` products, which are then added with ordinary rounding. 128 steps of 16
products that each lose up to 2⁻²³ lose at most 1.6e-5 of a squared norm, 8e-6 of a norm; the tests emulate such sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dp_microadam.clipping.precision import float32_sums, has_tensor_cores

DEPTH = 2048
"""Products that one float32 accumulator of a tensor core adds up."""

EXACT = 3
"""Terms of a float32 number."""


def split(values: Tensor, terms: int) -> list[Tensor]:
    """bfloat16 tensors that add up to float32 ``values``, the largest first.

    With three terms the sum is exact for numbers above 2⁻¹⁰⁰; with two it is within 2⁻¹⁶ of each number, with one within 2⁻⁸.
    A number that is not finite, or rounds to infinity, leaves an infinity or NaN, which no sum can hide.

    >>> [float(part) for part in split(torch.tensor(1 + 2.0**-9 + 2.0**-20), 3)]
    [1.0, 0.001953125, 9.5367431640625e-07]
    """
    found, rest = [], values
    for index in range(terms):
        found.append(rest.to(torch.bfloat16))
        if index + 1 < terms:
            rest = rest - found[-1].to(values.dtype)
    return found


def product(first: Tensor, second: Tensor, terms: tuple[int, int]) -> Tensor:
    """``first @ second`` of float32 matrices, or batches of them, by bfloat16 products added up in float32.

    ``terms`` says in how many bfloat16 numbers to split each factor: 1 if its values are bfloat16 already.
    """
    pairs = [
        (left, right)
        for i, left in enumerate(split(first, terms[0]))
        for j, right in enumerate(split(second, terms[1]))
        if i + j < max(terms)
    ]
    total: Tensor | None = None
    for left, right in reversed(pairs):  # small terms first
        for columns, rows in zip(left.split(DEPTH, dim=-1), right.split(DEPTH, dim=-2), strict=True):
            found = exact_products(columns, rows)
            total = found if total is None else total.add_(found)
    assert total is not None
    return total


def number_of_products(terms: tuple[int, int]) -> int:
    """How many bfloat16 products one product takes.

    >>> [number_of_products(terms) for terms in ((1, 1), (3, 1), (2, 2), (3, 3))]
    [1, 3, 3, 6]
    """
    return sum(i + j < max(terms) for i in range(terms[0]) for j in range(terms[1]))


def exact_products(left: Tensor, right: Tensor) -> Tensor:
    """The product of bfloat16 matrices, or batches of them, with exact products and float32 sums.

    Devices without tensor cores widen the factors to float32, which computes the same up to the order of the sum.
    """
    if has_tensor_cores(left.device) and hasattr(torch.ops.aten.bmm, "dtype"):
        multiply = torch.bmm if left.dim() == 3 else torch.mm
        with float32_sums():
            return multiply(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
