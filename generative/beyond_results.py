"""Results of ``generative.beyond``: files, and measures over views."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import torch

from common.results import Array, Entry, File, Json, Npz, ResultStore, Schema, Table, Text
from generative.squares import World
from generative.surroundings import DEATH, TURN, VALUE, Rollouts, certain
from stats.bootstrap import ClusterBootstrap

# Kinds of stored worlds: the most plausible one; its smallest change for an aim; what the search
# found; random worlds of about equal plausibility as the change.
PLAUSIBLE, CHANGED, SEARCHED, CONTROL = "plausible", "changed", "searched", "control"
LEAST = {DEATH: 0.05, TURN: 0.1, VALUE: 0.5}
"""Smallest effect that counts as one: 5 % of the range of the output (for the value, of the reward
of a coin)."""
TITLES = {"": "most plausible", DEATH: "dies", TURN: "turns", VALUE: "changes its value"}
QUANTITIES = {
    "searched": "effect found by the search (strength)", "random": "best of as many random worlds",
    "beats": "search beats random worlds (ties count half)", "gain": "search minus random worlds",
    "effect": "effect of the smallest change (strength)", "is_effect": "effect is large enough",
    "turned": "direction reversed", "num_different": "squares that the search changed",
    "num_squares": "squares of the smallest change", "distance": "distance from the view (squares)",
    "searched_percentile": "plausibility of what the search found (percentile of prior samples)",
    "percentile": "plausibility of the smallest change",
    "plausible_percentile": "plausibility of the most plausible world",
    "shuffled_percentile": "plausibility of a shuffled world",
    "persists": "effect persists if all other squares are redrawn",
    "occurs_at_random": "effect occurs in random worlds",
    "robustness": "persists minus occurs in random worlds"}
SUMMARY = {"aim": str, "quantity": str, "views": int, "levels": int, "mean": float, "low_95": float,
           "high_95": float, "median": float}
_OF_EFFECTS = ("num_squares", "distance", "percentile", "persists", "occurs_at_random",
               "robustness", "turned")  # measured only where there is an effect
_WORLD_ARRAYS = {  # a row for each world, otherwise as in sample files
    "world": Array(np.float16, "W n n K"), "world_corner": Array(np.float32, "W 2"),
    "world_places": Array(np.float16, "W n n"), "world_velocities": Array(np.float16, "W n n"),
    "world_looks": Array(np.int16, "W n n"), "world_clock": Array(np.int64, "W"),
    "world_seeds": Array(np.int64, "W"), "kind": Array(np.str_, "W"), "aim": Array(np.str_, "W"),
    "given": Array(np.bool_, "n n")}
_ROLLOUT_ARRAYS = {
    prefix + name: Array(np.float32, f"T {letter}" + (" 2" if name == "moved" else ""))
    for prefix, letter in (("", "W"), ("random_", "N")) for name in (
        field.name for field in dataclasses.fields(Rollouts))}
COUNTERFACTUAL = {
    "view": int, "episode": int, "frame": int, "level_seed": int, "near_end": bool,
    "aim": str, "effect": float, "step": int, "turned": bool, "searched": float, "random": float,
    "num_different": int, "num_squares": int, "kinds": str, "distance": float, "percentile": float,
    "searched_percentile": float, "plausible_percentile": float, "shuffled_percentile": float,
    "nats": float, "persists": float, "occurs_at_random": float}
BEYOND = Schema("worlds beyond the view", "python -m generative.beyond", items={
    "classes": Entry("classes.json", Json()),
    "worlds": Entry("worlds/{:0>5}.npz", Npz(_WORLD_ARRAYS)),
    "rollouts": Entry("rollouts/{:0>5}.npz", Npz(_ROLLOUT_ARRAYS)),
    "counterfactuals": Entry("views/{:0>5}.csv", Table(COUNTERFACTUAL, exact=True)),
    "film": Entry("films/view_{:0>5}.mp4", File()),
    "picture": Entry("pictures/view_{:0>5}.png", File())}, results={
    "table": Entry("counterfactuals.csv", Table(COUNTERFACTUAL)),
    "summary": Entry("summary.csv", Table(SUMMARY)), "report": Entry("report.md", Text())},
    informative=("versions", "agent_file", "model_file", "data_dir"))


def stored_worlds(store: ResultStore, number: int) -> tuple[World, np.ndarray, np.ndarray]:
    """Read the stored worlds of a view.

    Returns:
        Worlds with certain classes, and their kinds and aims (W,) each; the plausible one comes
        first, and has no aim.
    """
    arrays = store.read("worlds", number)
    fields = {name: torch.from_numpy(arrays[f"world_{name}"]) for name in (
        "places", "velocities", "looks", "clock", "seeds")}
    world = World.of(torch.from_numpy(arrays["world"]).float(),
                     torch.from_numpy(arrays["world_corner"]), **{
        name: field.float() if field.is_floating_point() else field.long()
        for name, field in fields.items()})
    return certain(world), arrays["kind"], arrays["aim"]


def with_measures(table: pd.DataFrame) -> pd.DataFrame:
    """Append columns to the table of counterfactuals that follow from others."""
    return table.assign(
        size=np.where(table["aim"] == DEATH, table["effect"], table["effect"].abs()),
        beats=(table["searched"] > table["random"]) + 0.5 * (table["searched"] == table["random"]),
        gain=table["searched"] - table["random"],
        robustness=table["persists"] - table["occurs_at_random"]).assign(
        is_effect=lambda rows: rows["size"] >= rows["aim"].map(LEAST))


def summarise(table: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return means over views, for each aim and quantity, with 95 % intervals over levels."""
    rows = []
    for aim, part in with_measures(table).groupby("aim", sort=False):
        for name in [name for name in QUANTITIES if aim == TURN or name != "turned"]:
            chosen = part[part["is_effect"]] if name in _OF_EFFECTS else part
            values = chosen["size" if name == "effect" else name].astype(float).to_numpy()
            levels = chosen["level_seed"].to_numpy()
            if len(values):
                low, high = ClusterBootstrap(levels, seed).interval(values[None])[:, 0]
                rows.append((aim, name, len(values), len(set(levels)), values.mean(), low, high,
                             np.median(values)))
    return pd.DataFrame(rows, columns=list(SUMMARY))
