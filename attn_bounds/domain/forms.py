"""`AffineForm`: a tensor as centre + linear images of error sets; `Groups`: the sets, oldest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..norms import spectral_norm_upper
from .sets import ErrorSet, Range

NO_SYMBOLS = "errors without symbols (memory)"  # their label in reports
ROWS_WORK = 4e11  # multiplications for the Gram matrices of all rows
SPECTRAL_SIZE = 1024  # a larger block is not worth its Gram matrix


@dataclass
class Rest:
    """Errors without symbols: any vector r with `|r| ≤ box` whose part along the last axis has `‖r‖₂ ≤ norm`.

    What a memory budget leaves no symbols for ends here. Nothing is known of how these errors depend on each
    other, so they never cancel.

    Attributes:
        box: (batch, *shape). norm: (batch, *shape[:-1]).
    """

    box: Tensor
    norm: Tensor

    def __post_init__(self) -> None:
        self.norm = torch.minimum(self.norm, torch.linalg.vector_norm(self.box, dim=-1))

    @classmethod
    def boxed(cls, box: Tensor) -> Rest:
        return cls(box, torch.linalg.vector_norm(box, dim=-1))

    def __add__(self, other: Rest | None) -> Rest:
        return self if other is None else Rest(self.box + other.box, self.norm + other.norm)

    def scaled(self, factor: Tensor) -> Rest:
        """Entries times factors of the shape of the box."""
        size = factor.abs()
        return Rest(self.box * size, self.norm * size.amax(-1))

    def moved(self, f: Callable[[Tensor], Tensor]) -> Rest:
        """Image under a map that only moves, copies or drops entries."""
        box = f(self.box)
        lengths = self.norm.unsqueeze(-1).expand(self.box.shape)
        # an output row made of entries of one input row is no longer than that
        rows = torch.arange(self.norm[0].numel(), dtype=box.dtype).reshape(1, *self.norm.shape[1:], 1)
        source, length = f(rows.expand(self.box.shape).clone()), f(lengths.clone())
        whole = source.amin(-1) == source.amax(-1)
        return Rest(box, torch.where(whole, length.amax(-1), torch.inf))

    def through(self, weight: Tensor) -> Rest:
        """Image under `r ↦ r W` along the last axis; W (d, d')."""
        by_norm = self.norm.unsqueeze(-1) * torch.linalg.vector_norm(weight, dim=0)
        box = torch.minimum(self.box @ weight.abs(), by_norm)
        return Rest(box, self.norm * spectral_norm_upper(weight.double()).to(weight))

    def summed(self, f: Callable[[Tensor], Tensor]) -> Rest:
        """Image under sums with weights ≥ 0 over other axes than the last."""
        norm = f(self.norm.unsqueeze(-1).expand(self.box.shape).clone()).amax(-1)
        return Rest(f(self.box), norm)


@dataclass
class AffineForm:
    """`x(e) = centre + Σ_k e_k · generators[:, k] + r`.

    Attributes:
        centre: (batch, *shape).
        generators: (batch, K, *shape). Symbols are numbered over all groups in order of creation; a form
            that depends on the first K symbols only stores those.
        rest: of r, or None where r = 0.
    """

    centre: Tensor
    generators: Tensor
    rest: Rest | None = None

    def __post_init__(self) -> None:
        # a constant may have broadcast the centre to a larger shape; the generators follow
        if self.generators.shape[2:] != self.centre.shape[1:]:
            self.generators = self.generators.expand(*self.generators.shape[:2], *self.centre.shape[1:])
        if self.rest is not None and self.rest.box.shape != self.centre.shape:
            self.rest = Rest.boxed(self.rest.box.expand(self.centre.shape))

    @property
    def symbols(self) -> int:
        return self.generators.shape[1]

    def padded(self, symbols: int) -> Tensor:
        """Generators with zeros for symbols that came later."""
        missing = symbols - self.symbols
        if missing == 0:
            return self.generators
        zeros = self.generators.new_zeros((self.generators.shape[0], missing, *self.centre.shape[1:]))
        return torch.cat([self.generators, zeros], 1)

    def linear(
        self,
        f: Callable[[Tensor], Tensor],
        homogeneous: Callable[[Tensor], Tensor] | None = None,
        rest: Callable[[Rest], Rest] | None = None,
    ) -> AffineForm:
        """Image under an affine map (rows, *shape) → (rows, *out), of all generators at once.

        Arguments:
            homogeneous: the map without its constant; default f itself. `f(g) − f(0)` would not do: a small
                generator is lost in a large constant.
            rest: image of the errors without symbols; default: f only moves entries.
        """
        batch, symbols = self.generators.shape[:2]
        out = f(self.centre)
        generators = (homogeneous or f)(self.generators.flatten(0, 1))
        image = None
        if self.rest is not None:
            image = self.rest.moved(f) if rest is None else rest(self.rest)
        return AffineForm(out, generators.reshape(batch, symbols, *out.shape[1:]), image)

    def __add__(self, other: AffineForm) -> AffineForm:
        symbols = max(self.symbols, other.symbols)
        rest = other.rest if self.rest is None else self.rest + other.rest
        return AffineForm(self.centre + other.centre, self.padded(symbols) + other.padded(symbols), rest)


def _quick_norm(matrix: Tensor) -> Tensor:
    """`‖M‖₂` from above by two squarings of the Gram matrix: `‖G⁴‖_F^¼ ≥ ‖G‖`, (r, c) → ()."""
    m = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    size = torch.linalg.matrix_norm(m).clamp(min=torch.finfo(m.dtype).tiny)
    gram = (m / size) @ (m / size).mT
    power = torch.linalg.matrix_norm(torch.linalg.matrix_power(gram, 4)) ** 0.25
    # each product of float32 matrices of norm ≤ 1 errs by a few hundred roundings at most
    slack = 16 * len(gram) * torch.finfo(m.dtype).eps
    return size * (power + slack).sqrt()


@dataclass
class Groups:
    """The error sets of one pass.

    Attributes:
        growth: factor (≥ 1) on every radius for the rounding of the generators.
        limit: number of symbols that there is memory for, or None.
        spare: numbers that may be kept for `joint.py` under a limit.
        backward: whether a backward pass follows, which needs bounds of more nodes.
        refine: labels of layers whose unstable neurons are bounded over all earlier nodes at once.
        folded: per set that got none of the symbols it wanted, its label and how many.
    """

    growth: float
    limit: int | None = None
    spare: int = 0
    backward: bool = False
    refine: frozenset[str] = frozenset()
    folded: list[tuple[str, int]] = field(default_factory=list)
    sets: list[ErrorSet] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])

    def add(self, error_set: ErrorSet) -> int:
        """Register a set; returns the number of its first symbol."""
        self.sets.append(error_set)
        self.offsets.append(self.offsets[-1] + error_set.size)
        return self.offsets[-2]

    def room(self, wanted: int) -> int:
        """How many of the wanted symbols a new set may have: at most half of those left, for others come."""
        if self.limit is None:
            return wanted
        left = max(0, self.limit - self.offsets[-1])
        return wanted if wanted <= left // 2 else left // 2

    def keep(self, numbers: int) -> bool:
        """Whether a rule may keep this many numbers for the final functionals; then they are spent."""
        if self.limit is None:
            return True
        if numbers > self.spare:
            return False
        self.spare -= numbers
        return True

    def parts(self, generators: Tensor) -> list[tuple[ErrorSet, Tensor]]:
        """The sets that generators (batch, K, …) depend on, each with its (batch, k, F) columns."""
        flat = generators.flatten(2)
        return [
            (s, flat[:, start : start + s.size])
            for s, start in zip(self.sets, self.offsets, strict=False)
            if start < generators.shape[1]
        ]

    def ranges(self, generators: Tensor, rest: Rest | None = None, tight: bool = False) -> list[Range]:
        """Range of the image per group, and of a rest at the end: list of two of (batch, *shape)."""
        shape = generators.shape[:1] + generators.shape[2:]
        out = []
        for s, w in self.parts(generators):
            low, high = s.tight_range(w) if tight else s.range(w)
            out.append(((low * self.growth).reshape(shape), (high * self.growth).reshape(shape)))
        if rest is not None:
            out.append((-rest.box * self.growth, rest.box * self.growth))
        return out

    def supports(self, generators: Tensor, rest: Rest | None = None) -> list[Tensor]:
        """Bound of |image| per group, and of a rest at the end: list of (batch, *shape)."""
        return [torch.maximum(-low, high) for low, high in self.ranges(generators, rest)]

    def grams(self, generators: Tensor) -> list[Tensor | None]:
        """`ρ² G Gᵀ` along the last axis for each group that lies in a ball of radius ρ, else None, float64.

        Shape: (batch, K, …, d) → (batch, …, d, d) each.
        """
        out: list[Tensor | None] = []
        for s, w in self.parts(generators):
            gram = None
            if s.radius is not None:
                rows = w.reshape(w.shape[0], -1, *generators.shape[2:]).double()
                gram = torch.einsum("bz...d,bz...e->b...de", rows, rows)
                ball = self.growth * s.radius.double().reshape(-1, *[1] * (gram.ndim - 1))
                gram = gram * ball.square()
            out.append(gram)
        return out

    @staticmethod
    def total(ranges: list[Range], like: Tensor) -> Range:
        """Sum of the groups' ranges; zeros like `like` (batch, *shape) where there are none."""
        low, high = torch.zeros_like(like), torch.zeros_like(like)
        for down, up in ranges:
            low, high = low + down, high + up
        return low, high

    def row_norms(self, x: AffineForm, weight: Tensor) -> Tensor:
        """Bounds of the l2 norm along the last axis of what a form moves, weighted entrywise.

        As `joint_norm` for every row; where the Gram matrices would be too much work, by supports alone.

        Arguments:
            weight: (batch, *shape), ≥ 0.

        Returns:
            (batch, *shape[:-1]).
        """
        total = torch.zeros_like(weight[..., 0])
        shape = weight.shape[1:]
        if x.rest is not None:
            total = x.rest.scaled(weight).norm * self.growth
        for (s, w), support in zip(self.parts(x.generators), self.supports(x.generators), strict=True):
            best = torch.linalg.vector_norm(support * weight, dim=-1)
            k, d = w.shape[1], shape[-1]
            if s.radius is not None and k * weight.numel() * min(k, d) <= ROWS_WORK:
                radius = self.growth * s.radius.reshape(-1, *[1] * (len(shape) - 1))
                rows = w.reshape(w.shape[0], k, -1, d).transpose(1, 2) * weight.reshape(len(w), -1, 1, d)
                norms = [_quick_norm(r) for r in rows.flatten(0, 1)]
                best = torch.minimum(best, radius * torch.stack(norms).reshape(best.shape))
            total = total + best
        return total

    def joint_norm(
        self, generators: Tensor, weight: Tensor, supports: list[Tensor], rest_norm: Tensor | None = None
    ) -> Tensor:
        """Bound of the l2 norm of a whole block, weighted entrywise.

        Per group the smaller of radius · spectral norm and the norm of the entries' supports (theory.md, 2).

        Arguments:
            generators: (batch, K, F). weight: (batch, F).
            supports: per group (batch, F), as `supports` returns them, that of a rest at the end.
            rest_norm: (batch,) bound of the l2 norm of a rest.

        Returns:
            (batch,).
        """
        total = generators.new_zeros(generators.shape[0])
        if rest_norm is not None:
            *supports, last = supports
            best = torch.linalg.vector_norm(last * weight, dim=1)
            total = torch.minimum(best, self.growth * rest_norm * weight.amax(1))
        for (s, w), support in zip(self.parts(generators), supports, strict=True):
            best = torch.linalg.vector_norm(support * weight, dim=1)
            if s.radius is not None and min(w.shape[1:]) <= SPECTRAL_SIZE:
                norm = spectral_norm_upper(w * weight.unsqueeze(1))
                best = torch.minimum(best, self.growth * s.radius * norm)
            total = total + best
        return total
