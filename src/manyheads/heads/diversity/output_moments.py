"""What the outputs of heads share: second moments summed over tokens, and the measures derived from them.

One set of sums serves three measures: linear CKA, the rank of all outputs of a layer together, and the cosine
between the contributions of heads, which is a matter of moments once the output projection is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# Numbers in the moments between different sites above which only those within a site are kept: 2 GB in
# float32, as many as a model of 42 layers with 768 channels has.
LARGEST = 2**29


class Outputs(NamedTuple):
    """The outputs of one site on some tokens, (tokens, heads, d_value)."""

    site: str
    values: Tensor


class _Moved(NamedTuple):
    """The sums of two sites relative to other starts; ``back`` is the skew of the second by the first."""

    products: Tensor
    lengths: Tensor
    skew: Tensor
    back: Tensor


class Moments:
    """Running sums of products of head outputs, for every pair of sites that saw the same tokens.

    Outputs are taken relative to the site's mean on the first tokens, which loses no digits later and
    changes nothing: sums of different batches add, and `merge` adds those of another process, which has
    another start. Without ``across``, of each site alone.

    >>> a, b = torch.randn(7, 2, 3), torch.randn(7, 2, 3)
    >>> moments = Moments()
    >>> moments.add([Outputs("a", a), Outputs("b", a @ torch.linalg.qr(torch.randn(3, 3))[0])])
    >>> moments.dependence("a", "b").diagonal() / moments.dependence("a", "a").diagonal()  # only turned
    tensor([1.0000, 1.0000], dtype=torch.float64)
    """

    def __init__(self, across: bool = True) -> None:
        self.shapes: dict[str, tuple[int, int]] = {}  # heads, d_value
        self.tokens: dict[tuple[str, str], int] = {}
        self.only_within = not across
        self.too_wide = False  # the moments between sites would not fit
        self._start: dict[str, Tensor] = {}  # (heads * d_value,)
        self._sum: dict[str, Tensor] = {}
        self._products: dict[tuple[str, str], Tensor] = {}  # (heads * d_value, heads * d_value)
        # of squared lengths: their products (heads, heads), and with the outputs (heads * d_value, heads)
        self._lengths: dict[tuple[str, str], Tensor] = {}
        self._skew: dict[tuple[str, str], Tensor] = {}

    def add(self, outputs: list[Outputs]) -> None:
        """Add the outputs of several sites for the same tokens."""
        flat: list[tuple[str, Tensor, Tensor]] = []
        for site, values in outputs:
            exact = values.flatten(1).to(torch.promote_types(values.dtype, torch.float32))
            if site not in self._start:
                self.shapes[site] = (values.shape[1], values.shape[2])
                self._start[site] = exact.mean(0)
                self._sum[site] = torch.zeros_like(self._start[site])
                self._make_room()
            exact = exact - self._start[site]
            self._sum[site] += exact.sum(0)
            flat.append((site, exact, exact.view(values.shape).square().sum(2)))
        for i, (one, x, size) in enumerate(flat):
            for other, y, other_size in flat[i : i + 1] if self.only_within else flat[i:]:
                pair = (one, other)
                self.tokens[pair] = self.tokens.get(pair, 0) + len(x)
                _accumulate(self._products, pair, x, y)
                _accumulate(self._lengths, pair, size, other_size)
                _accumulate(self._skew, pair, x, other_size)
                if one != other:
                    _accumulate(self._skew, (other, one), y, size)

    def _make_room(self) -> None:
        sizes = [heads * width for heads, width in self.shapes.values()]
        between = (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2
        if between > LARGEST and not self.only_within:
            self.only_within = self.too_wide = True
            for sums in (self._products, self._lengths, self._skew, self.tokens):
                for pair in [pair for pair in sums if pair[0] != pair[1]]:
                    del sums[pair]

    def merge(self, others: Moments) -> None:
        """Add the sums over other tokens of the same sites, which have another start, in float64.

        With d the difference of the starts, each x there is x + d here: the products below, multiplied out.
        """
        shifts = {site: start.double() - self._start[site].double() for site, start in others._start.items()}
        moved = {pair: others._moved(pair, shifts) for pair in others.tokens}
        for site, shift in shifts.items():
            count = others.tokens[site, site]
            self._sum[site] = self._sum[site].double() + others._sum[site].double() + count * shift
        for pair, sums in moved.items():
            self.tokens[pair] += others.tokens[pair]
            self._products[pair] = self._products[pair].double() + sums.products
            self._lengths[pair] = self._lengths[pair].double() + sums.lengths
            self._skew[pair] = self._skew[pair].double() + sums.skew
            if pair[0] != pair[1]:
                back = pair[::-1]
                self._skew[back] = self._skew[back].double() + sums.back

    def _moved(self, pair: tuple[str, str], shifts: Mapping[str, Tensor]) -> _Moved:
        """The sums of two sites relative to other starts, in float64: every output becomes x + shift."""
        (one, other), count = pair, self.tokens[pair]
        shapes = self.shapes[one], self.shapes[other]
        d, e = shifts[one], shifts[other]
        x, y = self._sum[one].double(), self._sum[other].double()
        products = self._products[pair].double()
        skew, back = self._skew[pair].double(), self._skew[other, one].double()

        def per_head(values: Tensor, shape: tuple[int, int]) -> Tensor:
            return values.view(*shape, *values.shape[1:]).sum(1)

        # sums over tokens of |x|^2, x d and d d, by head, and the same of the other site
        squares = [
            per_head(self._products[site, site].diagonal().double(), self.shapes[site]) for site in pair
        ]
        along = [
            per_head(total * shift, shape) for total, shift, shape in zip((x, y), (d, e), shapes, strict=True)
        ]
        lengths = [per_head(shift * shift, shape) for shift, shape in zip((d, e), shapes, strict=True)]
        added = [s + 2 * a + count * n for s, a, n in zip(squares, along, lengths, strict=True)]  # |x + d|^2
        x_along = per_head((products * e).T, shapes[1]).T  # sums of x (y e), (heads * d_value, heads)
        y_along = per_head(products * d[:, None], shapes[0]).T
        return _Moved(
            products + torch.outer(d, y) + torch.outer(x, e) + count * torch.outer(d, e),
            self._lengths[pair].double()
            + 2 * per_head(back * e[:, None], shapes[1]).T
            + 2 * per_head(skew * d[:, None], shapes[0])
            + 4 * per_head(x_along * d[:, None], shapes[0])
            + torch.outer(squares[0] + 2 * along[0], lengths[1])
            + torch.outer(lengths[0], added[1]),
            skew + 2 * x_along + torch.outer(x, lengths[1]) + torch.outer(d, added[1]),
            back + 2 * y_along + torch.outer(y, lengths[0]) + torch.outer(e, added[0]),
        )

    def comparable(self, one: str, other: str) -> bool:
        """Whether two sites were seen on the same tokens, each time; in the order of their first call."""
        count = self.tokens.get((one, other), 0)
        return count > 0 and count == self.tokens[one, one] == self.tokens[other, other]

    def covariance(self, one: str, other: str) -> Tensor:
        """Sums of products about the means, (heads * d_value, heads * d_value), in float64."""
        sums = self._sum[one].double(), self._sum[other].double()
        return self._products[one, other].double() - torch.outer(*sums) / self.tokens[one, other]

    def second(self, one: str, other: str) -> Tensor:
        """Sums of products as they are, (heads * d_value, heads * d_value), in float64."""
        count = self.tokens[one, other]
        means = [self._start[site].double() + self._sum[site].double() / count for site in (one, other)]
        return self.covariance(one, other) + count * torch.outer(*means)

    def dependence(self, one: str, other: str) -> Tensor:
        """What linear CKA is made of (heads, heads): the dependence of outputs on each other, which divided
        by the roots of that on themselves is 1 when they agree up to rotation and scale. NaN for fewer than
        four tokens.

        Debiased: with few tokens any two outputs agree somewhat by chance (CKA by about d_value / tokens),
        which n (n - 3) times the unbiased HSIC (Song and others 2012) does not. With outputs about their
        means, the rows of the kernels x x' sum to zero, and all of it follows from |sum x y'|^2, sum |x|^2,
        and sum |x|^2 |y|^2 over tokens.
        """
        count = self.tokens[one, other]
        if count < 4:
            return torch.full((self.shapes[one][0], self.shapes[other][0]), math.nan, dtype=torch.float64)
        cross = self.covariance(one, other)
        energy = by_head(cross, self.shapes[one], self.shapes[other]).square().sum((1, 3))
        sizes = [self._variance(site) for site in (one, other)]
        both = self._joint_lengths(one, other)
        return energy - both * count / (count - 2) + torch.outer(*sizes) / ((count - 1) * (count - 2))

    def _variance(self, site: str) -> Tensor:
        """Sum of |x|^2 about the mean, (heads,)."""
        count, total = self.tokens[site, site], self._sum[site].double()
        squares = self._products[site, site].diagonal().double() - total * total / count
        return squares.view(self.shapes[site]).sum(1)

    def _joint_lengths(self, one: str, other: str) -> Tensor:
        """Sum over tokens of |x|^2 |y|^2 about the means (heads, heads), from sums about the start.

        |u - m|^2 = |u|^2 - 2 u m + |m|^2 for both, multiplied out.
        """
        count, pair = self.tokens[one, other], (one, other)
        shapes = self.shapes[one], self.shapes[other]
        means = [
            (self._sum[site].double() / count).view(shape) for site, shape in zip(pair, shapes, strict=True)
        ]
        squares = [mean.square().sum(1) for mean in means]
        lengths = [
            self._products[site, site].diagonal().double().view(shape).sum(1)
            for site, shape in zip(pair, shapes, strict=True)
        ]
        # sum u |v|^2 projected on the mean of u, and the other way round
        skew = (self._skew[pair].double().view(*shapes[0], -1) * means[0][..., None]).sum(1)
        back = (self._skew[other, one].double().view(*shapes[1], -1) * means[1][..., None]).sum(1).T
        products = by_head(self._products[pair].double(), *shapes)
        crossed = torch.einsum("adbe,ad,be->ab", products, *means)
        return (
            self._lengths[pair].double()
            - 2 * (skew + back)
            + 4 * crossed
            + torch.outer(squares[0], lengths[1])
            + torch.outer(lengths[0], squares[1])
            - 3 * count * torch.outer(*squares)
        )

    def rank(self, site: str) -> tuple[int, int]:
        """How many directions the outputs of all heads of a site span together, and how many of these hold
        99% of the variance. Directions below the precision of the sums do not count.

        >>> moments = Moments()
        >>> x = torch.randn(11, 1, 3)
        >>> moments.add([Outputs("twice", x.repeat(1, 2, 1))])
        >>> moments.rank("twice")[0]
        3
        """
        values = torch.linalg.eigvalsh(self.covariance(site, site)).flip(0).clamp(min=0.0)
        precision = torch.finfo(self._start[site].dtype).eps * len(values)
        values = values[values > precision * values[0]]
        if not len(values):
            return 0, 0
        shares = values.cumsum(0) / values.sum()
        return len(values), int((shares < 0.99).sum()) + 1

    def contribution(self, one: str, other: str, columns: tuple[Tensor, Tensor]) -> Tensor:
        """The products of the heads' contributions after their output projections, summed over tokens.

        ``columns`` are those projections, (d_model, heads * d_value) each. What head a adds to a token is
        W_a o_a; summed over tokens, the products of two of these are those of W_a' W_b and the moments.
        """
        left, right = (weight.to(self._sum[one].device).double() for weight in columns)
        products = (left.T @ right) * self.second(one, other)
        return by_head(products, self.shapes[one], self.shapes[other]).sum((1, 3))


def _accumulate(
    sums: dict[tuple[str, str], Tensor], pair: tuple[str, str], left: Tensor, right: Tensor
) -> None:
    if pair in sums:
        sums[pair].addmm_(left.T, right)
    else:
        sums[pair] = left.T @ right


def by_head(products: Tensor, one: tuple[int, int], other: tuple[int, int]) -> Tensor:
    """(heads * d_value, heads * d_value) as (heads, d_value, heads, d_value)."""
    return products.view(*one, *other)
