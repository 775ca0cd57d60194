"""The gradient weight of every trust region over (μ, π), the picture in which DRPO argues its case."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..policy.trust_region import REGIONS, RegionParams, gradient_weight


def gradient_weight_grid(region: str, advantage: float, params: RegionParams, points: int = 101) -> np.ndarray:
    """Weight w on A·∇r over a grid of probabilities.

    Args:
        region: a key of `REGIONS`.
        advantage: A, the same everywhere.
        params: [`RegionParams`].
        points: grid points per axis, evenly spaced inside (0, 1).

    Returns: (points, points); row i is π = grid[i], column j is μ = grid[j], grid = (k + 1/2) / points.

    Raises:
        ValueError: a region over the K likeliest tokens, whose weight depends on more than the sampled token's μ and π.
    """
    if REGIONS[region].over == "topk":
        raise ValueError(f"{region} has no picture over (μ, π): it depends on tokens beside the sampled one.")
    grid = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    pi, mu = torch.meshgrid(grid, grid, indexing="ij")
    a = torch.full_like(mu, advantage)
    return gradient_weight(region, pi.log() - mu.log(), mu.log(), a, params).numpy()


def plot_gradient_weights(
    path: str | Path,
    params: RegionParams,
    regions: Sequence[str] = tuple(name for name, region in REGIONS.items() if region.over != "topk"),
    advantages: Sequence[float] = (1.0, -1.0),
    limit: float = 2.0,
) -> Path:
    """Write heat maps of the gradient weight: a column per region, a row per advantage.

    Args:
        path: PNG, SVG or PDF to write, by its ending.
        params: [`RegionParams`] of all regions.
        regions: which regions.
        advantages: which A.
        limit: colours span [-limit, limit]; weights beyond it, which SPO and the KL ablations have, are shown in its colour.

    Returns: the path.

    Raises:
        ImportError: matplotlib is missing (`pip install erpo-trl[plot]`).
    """
    columns = [(region, gradient_weight_grids(region, params, advantages)) for region in regions]
    draw_gradient_weights(columns, advantages, limit).savefig(path, dpi=150)
    return Path(path)


def gradient_weight_grids(region: str, params: RegionParams, advantages: Sequence[float]) -> list[np.ndarray]:
    """[`gradient_weight_grid`] for each advantage."""
    return [gradient_weight_grid(region, advantage, params) for advantage in advantages]


def draw_gradient_weights(
    columns: Sequence[tuple[str, Sequence[np.ndarray]]], advantages: Sequence[float], limit: float = 2.0
):
    """A matplotlib figure of heat maps.

    Args: columns: title and a grid per advantage, of each column; advantages, limit: as in [`plot_gradient_weights`].
    """
    from matplotlib.figure import Figure

    # Room for the colour bar and its label beside a single column
    figure = Figure(figsize=(1.9 * len(columns) + 1.4, 1.8 * len(advantages) + 0.5), layout="constrained")
    axes = figure.subplots(len(advantages), len(columns), squeeze=False, sharex=True, sharey=True)
    for index, (row, advantage) in enumerate(zip(axes, advantages)):
        for axis, (_, grids) in zip(row, columns):
            grid = grids[index]
            image = axis.imshow(
                grid,
                origin="lower",
                extent=(0, 1, 0, 1),
                cmap="RdBu_r",
                vmin=-limit,
                vmax=limit,
                interpolation="nearest",
            )
            if grid.min() < 0 < grid.max():
                axis.contour(grid, levels=[0.0], extent=(0, 1, 0, 1), colors="black", linewidths=0.7)
        row[0].set_ylabel(f"A = {advantage:+g}\nπ")
    for axis, (title, _) in zip(axes[0], columns):
        axis.set_title(title, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("μ")
    figure.colorbar(image, ax=axes, label="weight on A·∇r", shrink=0.8)
    return figure
