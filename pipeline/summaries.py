"""Summaries of the results of stages, see ``SUMMARIES``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.rollout_files import RolloutFolder
from agents.run_folder import newest_run, read_log
from analysis.influences.comparison import COMPARISON_FILES
from analysis.influences.comparison import claims_summary as influences_summary
from analysis.memory.table import CLAIMS as MEMORY_CLAIMS
from attribution.claims import CLAIMS as ATTRIBUTION_CLAIMS
from attribution.failures.results import ANY, FAILURES, ORIGINAL
from common.config import check_entries
from common.files import read_array, read_bytes, read_description, read_json
from common.results import ResultStore
from common.tables import format_count, read_table
from generative.fidelity import PSNR
from generative.loss_over_time import LAST_FRAME, SIMULATOR
from generative.runs import newest_simulator_run, read_progress
from generative.saliency.counterfactual import effect_sizes
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import COUNTERFACTUAL
from interventions.direction_folders import PROBE_ATLAS, SPARSE_FEATURES
from interventions.scan_study import SCANNED
from maze.field.results import FIELDS_FILES, UNPATCHED
from maze.studies.claims import CLAIMS as MAZE_CLAIMS
from pipeline.patterns import find
from pipeline.report_contents import attribution_checks, card_rows_at_step
from pipeline.stage import agent_experiment, simulator_experiment
from stats.effects import claims_summary
from stats.report import format_interval

_CLAIMS = {"attribution": ATTRIBUTION_CLAIMS, "maze": MAZE_CLAIMS, "memory": MEMORY_CLAIMS}
_EFFECTS = {"label": str, "outcome": str, "control": bool, "claimed": bool, **dict.fromkeys(
    ("num_controls", "effect", "low_95", "high_95", "control_low", "control_high"), float)}
_GAPS = ("control_low", "control_high")  # empty without controls
_SPECIFICITY = {"correlations": tuple[float | None, ...]}


def count(output: Path, pattern: str, unit: str) -> str:
    """Count the files that match a pattern; ``unit`` is their noun in the plural."""
    return format_count(len(list(output.glob(pattern))), unit)


def newest(output: Path, pattern: str) -> str:
    """Return the name of the newest file that matches a pattern."""
    return max(output.glob(pattern), key=lambda path: path.stat().st_mtime).name


def unseen_return(output: Path, _folder: str) -> str:
    """Report the return on unseen levels at the end of the agent's training."""
    last = read_log(newest_run(agent_experiment(output))).iloc[-1]
    return f"return {last['val_mean_episode_rewards']:.2f} on unseen levels"


def held_out_loss(output: Path, _folder: str) -> str:
    """Report the loss on held-out episodes at the end of the simulator's training."""
    run = newest_simulator_run(simulator_experiment(output))
    assert run is not None  # the stage has just written it
    return f"held-out loss {read_progress(run)['held_out_loss'].iloc[-1]:.4g}"


def success_rate(output: Path, path: str) -> str:
    """Report the success rate in an output file of evaluate.py."""
    kinds = {"success_rate": float, "success_interval": tuple[float, float], "num_episodes": int}
    found = check_entries(read_description(output / path), kinds, path, kinds)
    low, high = found["success_interval"]
    return (f"{100 * found['success_rate']:.1f} % of {found['num_episodes']} levels solved "
            f"({100 * low:.1f} to {100 * high:.1f})")


def recording(output: Path, folder: str) -> str:
    """Count the episodes and frames of a recording."""
    index = RolloutFolder(output / folder).index()
    return f"{index['episode'].nunique()} episodes, {len(index)} frames"


def image_quality(output: Path, _folder: str) -> str:
    """Report the PSNR of the simulator and of the last frame, after some steps."""
    step, rows = card_rows_at_step(output)
    own, last = (rows.loc[PSNR, name] for name in (SIMULATOR, LAST_FRAME))
    return (f"PSNR is {format_interval(own['mean'], own['low_95'], own['high_95'], '.1f')} dB at "
            f"step {step}, and {last['mean']:.1f} dB if the last frame is repeated")


def variance(output: Path, folder: str) -> str:
    """Count the principal components that hold 95 % of the hidden state's variance."""
    (file,) = (output / folder).glob("pc_loading_variances_*.npy")
    variances = read_array(file)
    enough = int((np.cumsum(variances) / variances.sum() < 0.95).sum()) + 1
    return f"{enough} components hold 95 % of the variance"


def clusters(output: Path, folder: str) -> str:
    """Count the clusters of an analysis."""
    (file,) = (output / folder).glob("cluster_means_*.npy")
    return f"{len(read_array(file))} clusters"


def agreement(output: Path, folder: str, method: str) -> str:
    """Report the mean agreement of behaviours between draws of the samples, for a clustering
    method."""
    (file,) = (output / folder).glob("behaviour_agreement_*.csv")
    table = read_table(file, {"data": str, "method": str, "adjusted_rand": float})
    means = table[table["method"] == method].groupby("data")["adjusted_rand"].mean()
    return (f"adjusted Rand index {means['samples']:.2f} between draws of the samples "
            f"({means['control']:.2f} without behaviours)")


def maps(output: Path, _folder: str, files: Sequence[str]) -> str:
    """Count saliency maps, and report their similarity, which is stored as "specificity"."""
    paths = find(output, files)
    steps = [step for path in paths if path.match("specificity*.json")
             for step in check_entries(read_json(path), _SPECIFICITY, path, _SPECIFICITY)[
                 "correlations"] if step is not None]
    number = f"{sum(path.match('saliency_*.json') for path in paths)} maps"
    return f"map similarity is {np.mean(steps):.2f} ({number})" if steps else number


def fillings(output: Path, folder: str) -> str:
    """Report how much filled blocks change the value."""
    files = SaliencyFolder(output / folder)
    numbers = [number for number in files.samples.numbers()
               if files.has("effects", number, "value" + COUNTERFACTUAL)]
    size, _, share = effect_sizes(files, numbers, "value")
    return (f"a filled block changes the value by {size:.2g}, and {100 * share:.0f} % of the "
            f"variance is due to what fills it ({format_count(len(numbers), 'samples')})")


def influences(output: Path, folder: str) -> str:
    """Count the claimed influences of components."""
    return influences_summary(ResultStore(output / folder, COMPARISON_FILES).read("table"))


def effects(output: Path, folder: str) -> str:
    """Count the claimed effects of a study, and report the largest effect on its first outcome."""
    table = read_table(output / folder / "effects.csv", _EFFECTS, _GAPS)
    outcome = table[(table["outcome"] == table["outcome"].iloc[0]) & ~table["control"]]
    row = outcome.loc[outcome["effect"].abs().idxmax()]
    interval = format_interval(row["effect"], row["low_95"], row["high_95"], "+.2f")
    controls = "" if np.isnan(row["control_low"]) else (
        f"; controls {row['control_low']:+.2f} to {row['control_high']:+.2f}")
    return (f"{claims_summary(table)}; largest change of the "
            f"{row['outcome'].replace('_', ' ')}: {interval}, {row['label']}{controls}")


def failures(output: Path, folder: str) -> str:
    """Report how often the unedited agent fails."""
    rates = ResultStore(output / folder, FAILURES).read("rates")
    own = rates[(rates["condition"] == ORIGINAL) & (rates["cause"] == ANY)].iloc[0]
    return (f"the agent fails {own['failures']} of {own['levels']} levels "
            f"({100 * own['low_95']:.0f} to {100 * own['high_95']:.0f} %)")


def checks(output: Path, _folder: str) -> str:
    """Count the checks of attributions that pass."""
    found = attribution_checks(output)
    return (f"{sum(check.passed is True for check in found)} of "
            f"{format_count(len(found), 'checks')} of the attributions pass")


def turns_to_cheese(output: Path, folder: str) -> str:
    """Report how often a maze agent turns to the cheese, with each list of patches."""
    table = ResultStore(output / folder, FIELDS_FILES).read("differences")
    means = table.groupby("condition", sort=False)["p_cheese"].mean()
    own = means.pop(UNPATCHED)
    patched = " and ".join(f"{mean:.2f} with {_patch_title(condition)}"
                           for condition, mean in means.items())
    return f"P(cheese) is {own:.2f}, {patched} ({format_count(table['level'].nunique(), 'levels')})"


def _patch_title(condition: str) -> str:
    """Return a condition of ``own_vectors``, such as cheese_-1, in words; others as they are."""
    found = re.fullmatch(r"(\w+)_([+-])([\d.]+)", condition)
    if not found:
        return condition
    name, sign, size = found.groups()
    return (f"the {name.replace('_', ' ')} vector {'added' if sign == '+' else 'subtracted'}"
            f"{'' if size == '1' else f' {size} times'}")


def claims(output: Path, folder: str, of: str) -> str:
    """Summarise a table of claims; ``of`` is a key of ``_CLAIMS``."""
    return _CLAIMS[of].summary(output / folder)


def decoded_labels(output: Path, folder: str) -> str:
    """Count the labels that are decodable beyond the current frame."""
    table = ResultStore(output / folder, PROBE_ATLAS).read("comparison")
    return (f"{table['claimed'].sum()} of {len(table)} labels are decoded better from the hidden "
            "state than from the best baseline without memory")


def sparse_features(output: Path, folder: str) -> str:
    """Report the variance that sparse features explain, and success with the reconstruction."""
    table = ResultStore(output / folder, SPARSE_FEATURES).read("dictionaries")
    row = table[table["dictionary"].str.startswith("sae")].iloc[0]
    return (f"sparse features explain {100 * row['variance_explained']:.0f} % of the hidden "
            f"state's variance, and {100 * row['success']:.0f} % of levels are solved with the "
            "reconstruction spliced in")


def patching(output: Path, folder: str, unit: str) -> str:
    """Report how well first-order estimates rank the effects of patches."""
    store = ResultStore(output / folder, SCANNED)
    ranks = pd.concat([store.read("agreement", layer) for layer in store.keys("agreement")])
    of_means = ranks["of_means"].dropna()
    return (f"rank correlation of the effects of {unit} with their first-order estimates: median "
            f"{of_means.median():.2f} of {len(of_means)} layers ({of_means.min():.2f} to "
            f"{of_means.max():.2f})")


def answer(output: Path, folder: str) -> str:
    """Return the answer of a question: the third paragraph of its report, after the title and the
    description of the runs."""
    text = read_bytes(output / folder / "report.md").decode(errors="replace")
    return text.split("\n\n")[:3][-1].removesuffix(".")


def explanation(output: Path, folder: str) -> str:
    """Return the explanation of a failure."""
    path = output / folder / "explanation.json"
    return check_entries(read_description(path), {"answer": str}, path, ("answer",))[
        "answer"].removesuffix(".")


# Functions of the output folder and of the arguments in the files of stages.
SUMMARIES: dict[str, Callable[..., str]] = {function.__name__: function for function in (
    count, newest, unseen_return, held_out_loss, success_rate, recording, image_quality,
    variance, clusters, agreement, maps, fillings, influences, effects, failures, checks, claims,
    decoded_labels, sparse_features, patching, turns_to_cheese, answer, explanation)}
