"""Figures of the uniformity of vectors on the unit sphere.

Letters in shape comments: N vectors of each kind, V dimensions, P principal components.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from analysis.bottleneck_vectors.sphere import uniform_cosine_density
from analysis.plotting.states import save
from common.palette import BLUE, VERMILION
from generative.config import SAMPLE_STARTS

INFORMED, RANDOM = VERMILION, BLUE
UNIFORM_STYLE = {"color": "black", "linestyle": ":", "label": "uniform on the sphere"}


def plot_spectrum(path: Path, informed: np.ndarray, random: np.ndarray, dimensions: int,
                  found: dict[str, dict]) -> None:
    """Variances of both kinds of vectors along the principal components of the informed ones.

    Args:
        informed, random: coordinates (N, P).
        dimensions: V.
        found: ``Uniformity`` of both, by the name of the start.
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    numbers = np.arange(1, informed.shape[1] + 1)
    for coordinates, colour, what in ((informed, INFORMED, "informed"), (random, RANDOM, "random")):
        axes.plot(numbers, coordinates.var(axis=0, ddof=1), color=colour, marker=".", label=what)
    axes.axhline(1 / dimensions, **UNIFORM_STYLE)
    axes.set(xlabel="principal component of the informed vectors", yscale="log",
             ylabel="variance of the coordinate")
    axes.grid(alpha=0.3)
    axes.legend()
    lines = [f"{len(informed)} informed and {len(random)} random bottleneck vectors of "
             f"{dimensions} dimensions"]
    lines += [f"{what}: {of['effective_dimensions']:.1f} effective dimensions (uniform: "
              f"{of['uniform_effective_dimensions']:.1f}), Bingham's test "
              f"{_p_value(of['bingham_p'])}"
              for what, of in _by_kind(found)]
    axes.set_title("\n".join(lines), fontsize=10, loc="left")
    save(figure, path)


def plot_cosines(path: Path, informed: np.ndarray, random: np.ndarray, dimensions: int,
                 found: dict[str, dict]) -> None:
    """Cosines between pairs of vectors of both kinds, and their density for uniform vectors.

    Args:
        informed, random: cosines (pairs,).
        dimensions: V.
        found: ``Uniformity`` of both, by the name of the start.
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    low = min(informed.min(), random.min())
    high = max(informed.max(), random.max())
    edges = np.linspace(low, high, 120)
    for cosines, colour, what in ((informed, INFORMED, "informed"), (random, RANDOM, "random")):
        axes.hist(cosines, edges, density=True, color=colour, alpha=0.5, label=what)
    middle = np.linspace(max(low, -0.999), min(high, 0.999), 400)
    axes.plot(middle, uniform_cosine_density(middle, dimensions), **UNIFORM_STYLE)
    axes.set(xlabel="cosine between two vectors", ylabel="density (1 per unit of the cosine)")
    axes.grid(alpha=0.3)
    axes.legend()
    lines = [f"{len(informed)} pairs of bottleneck vectors of each kind, {dimensions} dimensions"]
    lines += [f"{what}: the mean vector has the length {of['mean_norm']:.3f} (uniform: "
              f"{of['uniform_mean_norm']:.3f}), Rayleigh's test {_p_value(of['rayleigh_p'])}"
              for what, of in _by_kind(found)]
    axes.set_title("\n".join(lines), fontsize=10, loc="left")
    save(figure, path)


def _by_kind(found: dict[str, dict]) -> list[tuple[str, dict]]:
    return [(what, found[start]) for what, start in zip(("informed", "random"), SAMPLE_STARTS)]


def _p_value(p: float) -> str:
    return "p < 1e-12" if p < 1e-12 else f"p = {p:.2g}"
