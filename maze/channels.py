"""Channels that follow the cheese: tracking scores, effects of scaling them, and layer probes.

Channels are chosen on one half of the levels and reported on the other. The positive and negative
parts of the chosen channels of one layer are multiplied by factors, and the effect at decision
squares is compared with the effect of multiplying random channels. Linear probes decode properties
of the level from each layer. A killed run resumes after its last finished step.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.layers import Layer, all_layers
from agents.networks import Policy
from common.cli import count, from_zero, whole
from common.errors import UserError
from common.options import command, option, redefine
from common.palette import BLUE, DPI, VERMILION
from common.results import ResultStore
from common.tables import markdown_table
from envs.maze.state import MazeState, game_of
from interventions.flags import REFERENCE_SIZE
from interventions.tracking import SCORES
from maze.field.fields import reference_frames
from maze.options import AgentOptions, MazeOptions
from maze.studies.channels import (
    CENTRED,
    CHANNEL_FILES,
    CHEESE,
    CHOOSING,
    OBJECTS,
    OUTCOMES,
    PUBLISHED,
    REPORTING,
    Decisions,
    choose_channels,
    draw_got_cheese,
    find_map,
    multiply_channels,
    probe_layers,
    tracking_scores,
)
from maze.studies.vectors import LAYER
from stats.report import PATCHES, format_interval
from stats.report import report as effect_report

_METRICS = {"accuracy": "accuracy", "auc": "AUC", "log_loss": "log-loss (nats)", "r2": "R²"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackingOptions(AgentOptions):
    """Channels that follow the cheese: tracking scores, effects of scaling them, and layer
    probes."""

    num_mazes: int = redefine(MazeOptions, "num_mazes", default=100)
    layers: tuple[str, ...] | None = option(
        None, "convolutional layers to score and probe; if not given, the residual additions, or "
              "all such layers of a network without residual additions", metavar="LAYER")
    layer: str = option(LAYER, "layer whose chosen channels are multiplied")
    num_channels: int = option(11, "maximum number of channels to choose per layer", type=count)
    factors: tuple[str, ...] = option(
        ("-3", "-1", "0", "2", "positive:0", "positive:2"),
        "factors by which channels are multiplied; positive:2,negative:0 doubles the positive part "
        "and removes the negative part", metavar="FACTOR")
    num_controls: int = option(19, "number of random sets of channels per factor",
                               type=whole(2, 1000))
    num_shuffles: int = option(2, "number of probes with shuffled labels", type=from_zero)
    output_dir: Path = redefine(AgentOptions, "output_dir", default=Path("analysis/maze/channels"))


def track_cheese(options: TrackingOptions) -> pd.DataFrame | None:
    """Find and test channels that follow the cheese, write the results to ``options.output_dir``,
    and return the tracking scores; None for a dry run."""
    policy, compute = options.load_agent(), options.compute
    layers, multiplied_layer = parse_layers(policy, options.layers, options.layer)
    factors = [parse_factor(text) for text in options.factors]
    states = dataclasses.replace(options, num_mazes=2 * options.num_mazes).choose_levels()
    half = len(states) // 2
    sets = {CHOOSING: states[:half], REPORTING: states[half:]}
    decisions = Decisions(policy, compute, sets[REPORTING])
    for state in states:
        state.grid.cheese  # noqa: B018  raises for none or several
    seeds = {name: [state.level_seed for state in levels] for name, levels in sets.items()}
    if options.dry_run:
        print(*(f"{name}: {numbers}" for name, numbers in seeds.items()), sep="\n")
        return None
    store = options.open_store(CHANNEL_FILES, {
        "levels": seeds, "layers": [layer.name for layer in layers], "layer": multiplied_layer.name,
        "factors": options.factors, "num_forks": len(decisions.states),
        "num_channels": options.num_channels, "num_controls": options.num_controls,
        "num_shuffles": options.num_shuffles, "seed": options.seed}, states=states)
    scores = pd.concat([
        store.compute("scores", name, function=functools.partial(
            tracking_scores, policy, compute, layers, levels, name, options.seed))
        for name, levels in sets.items()], ignore_index=True)
    chosen = choose_channels(scores[scores["set"] == CHOOSING], options.num_channels)
    scores["chosen"] = pd.MultiIndex.from_frame(scores[["layer", "channel"]]).isin(chosen)
    multiplied = [channel for layer, channel in chosen if layer == multiplied_layer.name]
    effects = multiply_chosen(options, store, decisions, multiplied_layer, multiplied, factors,
                              states)
    probes = store.compute("probes", function=lambda: probe_layers(
        policy, layers, states, draw_got_cheese(policy, compute, states, options.seed),
        options.seed, options.num_shuffles))
    store.write("report", value=report(scores, multiplied_layer.name, effects, probes,
                                       len(decisions.states)))
    with store.file("figure") as temporary:
        plot(temporary, scores, probes)
    store.write("channels", value=scores)
    print(*(f"{layer}: channel {channel} was chosen as following the cheese"
            for layer, channel in chosen), f"wrote {store.file_of('channels')}", sep="\n")
    return scores


def multiply_chosen(options: TrackingOptions, store: ResultStore, decisions: Decisions,
                    layer: Layer, channels: Sequence[int],
                    factors: Sequence[tuple[float, float]], states: Sequence[MazeState]
                    ) -> pd.DataFrame:
    """Return the effects of multiplying the strongest channel, and all channels together; empty
    without channels."""
    if not channels:
        return pd.DataFrame()
    reference = reference_frames(game_of(states), {state.level_seed for state in states},
                                 REFERENCE_SIZE, options.seed)
    groups = [channels[:1], *([channels] if len(channels) > 1 else [])]
    return store.compute("effects", function=lambda: multiply_channels(
        decisions, layer, groups, factors, reference, options.num_controls, options.seed))


def parse_layers(policy: Policy, names: Sequence[str] | None, multiplied: str
                 ) -> tuple[list[Layer], Layer]:
    """Return the layers to score and probe, in order of computation, and the layer to multiply.

    Args:
        names: value of ``--layers``; None for the default layers.
        multiplied: value of ``--layer``; this layer is scored, too.

    Raises:
        UserError: if the agent does not have a layer, or a layer is not convolutional.
    """
    maps = [layer for layer in all_layers(policy) if layer.is_map]
    names = names or ([layer.name for layer in maps if layer.name.endswith("resadd")]
                      or [layer.name for layer in maps])
    layer = find_map(policy, multiplied)
    chosen = {find_map(policy, name).name for name in names} | {layer.name}
    return [other for other in maps if other.name in chosen], layer


def parse_factor(text: str) -> tuple[float, float]:
    """Return the factors of the positive and the negative part.

    Args:
        text: one factor for both parts, such as ``2``, or factors of parts, such as
            ``positive:2,negative:0``; the factor of a missing part is 1.

    Raises:
        UserError: if the text is malformed.
    """
    number = r"-?\d+(?:\.\d+)?"
    if re.fullmatch(number, text):
        return float(text), float(text)
    parts = dict(re.findall(f"(positive|negative):({number})(?:,|$)", text))
    if not parts or ",".join(f"{name}:{value}" for name, value in parts.items()) != text:
        raise UserError("--factors takes numbers such as -1, or positive:2,negative:0 for the "
                        f"two parts, not '{text}'")
    return float(parts.get("positive", 1)), float(parts.get("negative", 1))


def report(scores: pd.DataFrame, layer: str, effects: pd.DataFrame, probes: pd.DataFrame,
           num_forks: int) -> str:
    """Return the report as Markdown.

    Args:
        scores: tracking scores on both sets of levels, with the column ``chosen``.
        layer: name of the layer whose channels were multiplied.
        effects: effects of the multiplied channels; empty if none was chosen.
        num_forks: number of forks at which effects were measured.
    """
    sizes = scores.drop_duplicates("set").set_index("set")["num_levels"]
    lines = [
        "# Channels that follow the cheese", "",
        f"Channels were chosen on {sizes['choosing']} levels: their hit rate, contrast and "
        "specificity exceed the maximum over all channels with permuted squares, and their "
        "contrast is larger for the cheese than for a wall at the same squares. The numbers below "
        f"are from {sizes['reporting']} other levels. Contrasts are in standard deviations of a "
        "channel.", ""]
    chosen = scores[(scores["set"] == REPORTING) & scores["chosen"]]
    by_thing = {thing: chosen[(chosen["thing"] == thing) & (chosen["mapping"] == PUBLISHED)
                              ].set_index(["layer", "channel"]) for thing in OBJECTS}
    rows = [(name, str(channel), *(f"{row[score]:.3f}" for score in SCORES), f"{row['at']:.3g}",
             f"{row['elsewhere']:.3g}",
             *(f"{by_thing[thing].loc[(name, channel), 'contrast']:.2f}" for thing in OBJECTS[1:]),
             "yes" if row["tracks"] else "no")
            for (name, channel), row in by_thing[CHEESE].iterrows()]
    lines += markdown_table(
        ("layer", "channel", "hit rate", "contrast", "specificity", "at the cheese", "elsewhere",
         "contrast: mouse", "contrast: wall", "above chance on these levels, too"), rows)
    cheese = chosen[chosen["thing"] == CHEESE].groupby("mapping")["contrast"].mean()
    if len(cheese):
        lines += [f"Mean contrast of these channels with the cells of the published mapping: "
                  f"{cheese[PUBLISHED]:.3f}; with cells whose receptive field is centred on the "
                  f"square: {cheese[CENTRED]:.3f}.", ""]
    lines += ["## Probes", "", "Linear probes, trained, selected and tested on different levels; "
              "95 % intervals over levels. Base: score without the layer. Shuffled: labels "
              "shuffled between levels.", "", *markdown_table(
                  ("layer", "target", "metric", "score (95 %)", "base", "shuffled"),
                  [(row.layer, row.target, _METRICS[row.metric],
                    format_interval(row.score, row.low_95, row.high_95, ".3f"), f"{row.base:.3f}",
                    f"{row.shuffled:.3f}") for row in probes.itertuples()])]
    if effects.empty:
        return "\n".join([*lines, "## Multiplied channels", "", f"No channel of {layer} was "
                          "chosen, so none was multiplied."])
    multiplied = effect_report(
        effects, OUTCOMES, PATCHES, "The positive and negative parts of the chosen channels of "
        f"{layer} were multiplied at the decision squares of {num_forks} forks among the reported "
        "levels.")
    return "\n".join(lines) + "\n" + multiplied.replace("\n#", "\n##").replace("# ", "## ", 1)


def plot(path: Path, scores: pd.DataFrame, probes: pd.DataFrame) -> None:
    """Plot hit rate against contrast of the cheese for the channels of each layer, and the probe
    scores by target."""
    shown = scores[(scores["set"] == REPORTING) & (scores["mapping"] == PUBLISHED)
                   & (scores["thing"] == CHEESE)]
    layers, targets = list(shown["layer"].unique()), list(probes["target"].unique())
    columns = max(len(layers), -(-len(targets) // 2))
    figure = Figure(figsize=(3.2 * columns, 9.5), layout="constrained")
    panels = figure.subplots(3, columns, squeeze=False)
    for axes, layer in zip(panels[0], layers):
        part = shown[shown["layer"] == layer]
        axes.axhline(part["hit_rate_threshold"].iloc[0], color="#888888", linewidth=0.8)
        axes.axvline(part["contrast_threshold"].iloc[0], color="#888888", linewidth=0.8)
        axes.scatter(part["contrast"], part["hit_rate"], s=14,
                     color=np.where(part["chosen"], VERMILION, BLUE))
        for row in part[part["chosen"]].itertuples():
            axes.annotate(str(row.channel), (row.contrast, row.hit_rate), fontsize=8)
        axes.set(title=layer.removeprefix("embedder."), xlabel="contrast of the cheese (sd)",
                 ylabel="hit rate", ylim=(-0.03, 1.06))
    for axes, target in zip(panels[1:].flat, targets):
        part = probes[(probes["target"] == target) & probes["metric"].isin(("accuracy", "r2"))]
        places = np.arange(len(part))
        axes.errorbar(places, part["score"], np.array([part["score"] - part["low_95"],
                                                       part["high_95"] - part["score"]]),
                      color=BLUE, marker="o", markersize=4, linewidth=1.2, label="probe")
        axes.plot(places, part["base"], color="black", linewidth=0.8, label="base")
        axes.plot(places, part["shuffled"], color="#888888", linestyle=":", label="shuffled")
        axes.set_xticks(places, [name.removeprefix("embedder.") for name in part["layer"]],
                        rotation=60, ha="right", fontsize=7)
        axes.set(title=target.replace("_", " "), ylabel=_METRICS[part["metric"].iloc[0]])
    for axes in panels.flat:
        axes.set_visible(axes.has_data())
    panels[1, 0].legend(fontsize=8)
    best = shown.loc[shown["hit_rate"].idxmax()]
    figure.suptitle(f"{shown['chosen'].sum()} of {len(shown)} channels were chosen on other levels "
                    "as following the cheese (red, above); highest hit rate "
                    f"{best['hit_rate']:.2f}: channel {best['channel']} of "
                    f"{best['layer'].removeprefix('embedder.')}\nbelow: what probes decode")
    figure.savefig(path, dpi=DPI, format="png")


main = command(TrackingOptions, track_cheese)

if __name__ == "__main__":
    raise SystemExit(main())
