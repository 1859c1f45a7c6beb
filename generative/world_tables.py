"""Tables of measures: statistics of two groups, JSON, and text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from common.tables import finite_or_none
from stats.association import Estimate, estimate, ratio
from stats.bootstrap import ClusterBootstrap
from stats.report import format_interval

Table = dict[str, Any]
"""Measures by name: estimates, numbers, texts, or further tables."""


def mean(values: np.ndarray, clusters: np.ndarray, seed: int) -> Estimate:
    """Estimate the mean of values (N,) with its 95 % interval over clusters (N,)."""
    return ratio(values, np.ones(len(values)), clusters, ClusterBootstrap(clusters, seed))


def ratio_of_means(first: np.ndarray, first_clusters: np.ndarray, second: np.ndarray,
                   second_clusters: np.ndarray, seed: int) -> Estimate:
    """Estimate the ratio of the means of two groups; their sizes and clusters may differ.

    The numbers of the clusters of both groups must be different.
    """
    one = np.arange(len(first) + len(second)) < len(first)
    values, clusters = (np.concatenate(pair).astype(float) for pair in (
        (first, second), (first_clusters, second_clusters)))

    def quotient(sums: np.ndarray) -> np.ndarray:
        top, num_top, bottom, num_bottom = np.moveaxis(sums, -1, 0)
        return np.divide(top * num_bottom, bottom * num_top,
                         out=np.full(np.shape(top), np.nan), where=bottom * num_top != 0)

    return estimate(quotient, np.stack([values * one, one, values * ~one, ~one]), clusters,
                    ClusterBootstrap(clusters, seed))


def event_probability(ends: np.ndarray, events: np.ndarray) -> np.ndarray:
    """Compute the probability that an event has ended an episode by each step (T, B).

    Args:
        ends: probabilities that the episode ends at a step, if it has not ended before (T, B).
        events: the same for ends by the event, at most ``ends`` (T, B).
    """
    survives = np.cumprod(1 - ends.astype(np.float64), axis=0)
    before = np.concatenate([np.ones_like(survives[:1]), survives[:-1]])
    return (before * events).cumsum(axis=0)


def as_json(value: Any) -> Any:
    """Convert tables, estimates and numbers to values that JSON can represent; NaN becomes None."""
    if isinstance(value, Estimate):
        return {"value": as_json(value.value), "interval_95": [as_json(value.low),
                                                               as_json(value.high)]}
    if isinstance(value, dict):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, (float, np.floating)):
        return finite_or_none(value)
    return value


def print_tables(tables: Table) -> None:
    """Print one line per measure, with its 95 % interval."""
    for name, value in _lines(tables, ""):
        text = (format_interval(value.value, value.low, value.high, ".3f")
                if isinstance(value, Estimate) else
                f"{value:.3f}" if isinstance(value, float) else str(value))
        print(f"{name}: {text}")


def _lines(table: Table, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{prefix}{name}, ".replace("_", " "))
        else:
            yield (prefix + name).replace("_", " "), value
