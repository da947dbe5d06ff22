"""Rows of scalars of any laws and patterns, for tests of the rANS coder's paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from codec import rans_torch, scalars
from codec.cells import Ints
from codec.formats import FORMATS, NumberFormat
from codec.rans import Symbols
from codec.residual import ChannelScales, gaussian_table, grid_limit, place_values, scale_integers
from codec.scalars_torch import Laws, Placed
from tests import codec_samples as samples

ANY = list(FORMATS.values())
TABLE = gaussian_table()
TABLES = {f.name: scalars.tables_of(TABLE, f) for f in ANY}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@dataclass(frozen=True)
class Rows:
    """Rows of scalars and their laws, [n, T] each."""

    fmt: NumberFormat
    patterns: Ints
    mean: Any
    grid: Ints
    reciprocal: Ints

    def put(self, lanes: int) -> tuple[Symbols, int]:
        law = self.mean, self.grid, self.reciprocal
        return scalars.put_gridded(self.patterns, *law, TABLES[self.fmt.name], lanes)

    def placed(self) -> Placed:
        """The placement [n, T], as tensors."""
        where = place_values(self.mean, ChannelScales(self.grid, self.reciprocal), self.fmt)
        return Placed(*(torch.from_numpy(x.copy()) for x in (where.mean, where.start, where.grid, where.reciprocal)))


def any_rows(rng: np.random.Generator, fmt: NumberFormat, rows: int, count: int) -> Rows:
    """Any laws within a profile's bounds; patterns near them, anywhere, and hostile ones (NaNs, infinities, -0, denormals)."""
    shape = (rows, count)
    sigma = 2.0 ** rng.uniform(-25, 12, shape)
    grid, reciprocal = scale_integers(sigma, fmt)
    wild = rng.random(shape) < 0.2
    grid = np.where(wild, rng.integers(fmt.emin, grid_limit(fmt) + 1, shape), grid)
    reciprocal = np.where(wild, rng.integers(1, (1 << 20) + 1, shape), reciprocal)
    mean = rng.standard_normal(shape) * 2.0 ** rng.uniform(-30, 12, shape)
    mean = np.where(rng.random(shape) < 0.3, sigma * rng.integers(-9, 10, shape) / 8, mean)  # cell edges, cell 0
    mean = np.where(rng.random(shape) < 0.05, rng.choice([0.0, -0.0, 3e38, -3e38, 1e300, 1e-300], shape), mean)
    near = torch.from_numpy(np.clip(mean + sigma * rng.standard_normal(shape), -fmt.max_finite, fmt.max_finite))
    patterns = fmt.patterns(samples.cast(near, fmt))
    hostile = samples.hostile_patterns(fmt)
    patterns = np.where(rng.random(shape) < 0.2, rng.integers(0, 1 << fmt.item_bits, shape), patterns)
    patterns = np.where(rng.random(shape) < 0.2, hostile[rng.integers(0, len(hostile), shape)], patterns)
    return Rows(fmt, patterns, mean, grid, reciprocal)


def read_torch(streams: list[bytes], rows: list[Rows], lanes: int, device: str = "cpu") -> Tensor:
    """Patterns [B, n, T] of streams whose rows are of the longest one's shape once they are filled up."""
    longest = max(r.patterns.shape[1] for r in rows)
    counts = torch.tensor([r.patterns.shape[1] for r in rows], device=device)
    coder = rans_torch.Decoder(streams, lanes, Laws(TABLES[rows[0].fmt.name], device))
    out, placed = [], [r.placed() for r in rows]
    for row in range(len(rows[0].patterns)):
        parts = zip(*placed, strict=True)
        filled = [
            torch.cat(
                [torch.nn.functional.pad(x[row][None], (0, longest - x.shape[1]), mode="replicate") for x in some]
            )
            for some in parts
        ]
        out.append(coder.row(Placed(*(x.to(device) for x in filled)), counts))
    coder.finish()
    return torch.stack(out, 1).cpu()
