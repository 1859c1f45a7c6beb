"""Descriptions of the claimed influences in a behaviour in plain sentences, as Markdown.

All numbers come from the tables of ``analysis/dynamics_grads_consistency_plots.py``;
``analysis/influences/consistency.py`` defines when an influence is claimed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd

from agents.outputs import ANSWERS
from analysis.influences.comparison import WITH, WITHOUT
from analysis.influences.gradients import answer_name
from common.game_constants import NUM_ACTIONS

MOST_LISTED = 10  # largest number of listed influences of a kind on a page
STEADY = 0.9  # share of samples with the median's sign below which "on average" is added
_ENDING = 0.5  # terminal probability above which a sample counts as ended


def target_words(target: str) -> str:
    """Return the readable name of a target in the tables."""
    return f"the {answer_name(target)}" if target in ANSWERS else target


def when_words(lag: int) -> str:
    return "in the same step" if lag == 0 else f"{lag} step{'s' if lag > 1 else ''} later"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def p_words(p: float) -> str:
    return f"p = {p:.3g}"


@dataclasses.dataclass(frozen=True)
class SampleFacts:
    """Summary of a group of samples.

    Attributes:
        number: number of samples in the group.
        share: share of all samples that are in the group.
        actions: number of samples in which each action is the most likely at the saliency step
            (A,).
        value: mean value estimate at the saliency step.
        ended: number of samples in which the episode ends.
        rewarded: number of samples with a reward above 0.5.
        unusual: ICs whose mean in the group at the saliency step differs most from the mean over
            all samples, as (IC number, mean in the group, mean over all samples).
    """

    number: int
    share: float
    actions: np.ndarray
    value: float
    ended: int
    rewarded: int
    unusual: Sequence[tuple[int, float, float]]


def sample_facts(rows: np.ndarray, log_probs: np.ndarray, values: np.ndarray,
                 terminals: np.ndarray, rewards: np.ndarray, ics: np.ndarray,
                 step: int) -> SampleFacts:
    """Summarise a group of samples.

    Args:
        rows: indices of the group's samples among all M samples (n,).
        log_probs: log-probabilities of the actions (M, T, A).
        values: value estimates (M, T).
        terminals: probabilities that the episode ends (M, T).
        rewards: rewards (M, T).
        ics: coordinates of the ICs (M, T, I).
        step: saliency step.
    """
    here, everywhere = ics[rows, step].mean(axis=0), ics[:, step].mean(axis=0)
    spread = np.maximum(ics[:, step].std(axis=0), np.finfo(np.float32).tiny)
    order = np.argsort(-np.abs(here - everywhere) / spread)[:3]
    actions = np.bincount(log_probs[rows, step].argmax(axis=-1), minlength=NUM_ACTIONS)
    return SampleFacts(
        len(rows), len(rows) / len(ics), actions, float(values[rows, step].mean()),
        int((terminals[rows] > _ENDING).any(axis=1).sum()),
        int((rewards[rows] > 0.5).any(axis=1).sum()),
        [(int(i), float(here[i]), float(everywhere[i])) for i in order])


def facts_text(facts: SampleFacts, step: int, action_names: Sequence[str],
               everything: bool) -> str:
    """Describe a group of samples in sentences.

    Args:
        facts: summary of the group.
        step: saliency step.
        action_names: names of the actions (A,).
        everything: whether the group contains all samples; unusual ICs are then left out.
    """
    most = np.argsort(-facts.actions, kind="stable")[:3]
    actions = ", ".join(f"{action_names[i]} in {facts.actions[i]}" for i in most
                        if facts.actions[i])
    text = (f"{facts.number} samples{'' if everything else f' ({percent(facts.share)} of all)'}. "
            if facts.number > 1 else "One sample alone. ")
    text += (f"At step {step} the agent's likeliest action is {actions} of them; its mean value "
             f"estimate is {facts.value:.2f}. {facts.ended} end within their steps, "
             f"{facts.rewarded} bring a reward.")
    if not everything:
        text += (" Compared with all samples, these components differ most at that step: "
                 + ", ".join(f"IC {i} (mean {here:+.2f}, all samples {all_of:+.2f})"
                             for i, here, all_of in facts.unusual) + ".")
    return text


def influence_sentence(row: pd.Series, other: pd.Series | None) -> str:
    """Describe one claimed influence in sentences.

    Args:
        row: row of the table of agreements.
        other: row of the same influence with the other kind of gradient; None if not computed.
    """
    verb = "raises" if row["median_gradient"] > 0 else "lowers"
    when = when_words(row["lag"])
    steady = "" if row["steadiness"] >= STEADY else ", on average"
    text = (f"**{row['source']} {verb} {target_words(row['target'])} {when}{steady}.** The median "
            f"gradient is {row['median_gradient']:+.2f} (mean {row['gradient']:+.2f}; of that sign "
            f"in {percent(row['steadiness'])} of the samples), the cross-correlation "
            f"{row['cross_correlation']:+.2f}. Gradient and deviations agree in "
            f"{percent(row['agreement'])} of the samples, where shuffled ones agree in half "
            f"(corrected {p_words(row['p_corrected'])}). One standard deviation of "
            f"{row['source']} moves the target by {row['effect']:.2f} of its own; "
            + explained_words(row["explained"]))
    if other is not None:
        kind = f"{other['env_grads']} gradients through the environment"
        text += (f" It is claimed {kind}, too (median gradient "
                 f"{other['median_gradient']:+.2f})."
                 if other["claimed"] else
                 f" It is not claimed {kind} (median gradient "
                 f"{other['median_gradient']:+.2f}, agreement {percent(other['agreement'])}, "
                 f"corrected {p_words(other['p_corrected'])}).")
    return text


def explained_words(share: float) -> str:
    if share <= 0:
        return "but at that step their covariance has another sign, so something else outweighs it."
    if share > 1:
        return "that is more than their whole covariance, so something else works against it."
    return (f"that is {percent(share)} of their covariance, and the rest is owed to something "
            "else." if share < 0.95 else "that is about all of their covariance.")


class BehaviourInfluences:
    """Influences in one group of samples.

    Args:
        table: rows of ``agreement.csv`` for this group.
        matrices: rows of ``agreement_of_matrices.csv`` for this group.
        level: significance level of the comparison.
        min_samples: smallest number of samples for a test.
    """

    def __init__(self, table: pd.DataFrame, matrices: pd.DataFrame, level: float,
                 min_samples: int):
        self._table, self._matrices = table, matrices
        self._level, self._min_samples = level, min_samples
        self.num_samples = int(table["samples"].iloc[0])
        self.variants = [kind for kind in (WITH, WITHOUT) if (table["env_grads"] == kind).any()]

    @property
    def testable(self) -> bool:
        return self.num_samples >= self._min_samples

    def claims(self, variant: str) -> pd.DataFrame:
        """Return the claimed influences on targets other than the source, most consistent first."""
        rows = self._of(variant)
        return _by_consistency(rows[rows["claimed"] & (rows["source"] != rows["target"])])

    def num_tested(self, variant: str) -> int:
        """Return the number of tested influences on targets other than the source."""
        rows = self._of(variant)
        return int((rows["source"] != rows["target"]).sum()) if self.testable else 0

    def best(self, variant: str, number: int) -> pd.DataFrame:
        """Return the ``number`` most consistent influences on targets other than the source,
        claimed ones first."""
        rows = self._of(variant)
        rows = rows[rows["source"] != rows["target"]]
        return pd.concat([_by_consistency(rows[rows["claimed"]]),
                          _by_consistency(rows[~rows["claimed"]])]).head(number)

    def counterpart(self, row: pd.Series) -> pd.Series | None:
        """Return the row of the same influence with the other kind of gradient, or None."""
        others = self._of(WITHOUT if row["env_grads"] == WITH else WITH)
        same = others[(others["lag"] == row["lag"]) & (others["source"] == row["source"])
                      & (others["target"] == row["target"])]
        return same.iloc[0] if len(same) else None

    def text(self, variant: str) -> str:
        """Describe all influences with one kind of gradient, as Markdown."""
        rows = self._of(variant)
        if not self.testable:
            return (f"{self.num_samples} sample{'s are' if self.num_samples > 1 else ' is'} too "
                    f"few for a test, which needs {self._min_samples}; nothing is claimed.\n")
        claims = self.claims(variant)
        on_answers = claims["target"].isin(list(ANSWERS))
        parts = [self._list(claims[~on_answers], "Components on other components"),
                 self._list(claims[on_answers], "Components on what the agent answers")]
        if not (rows["target"].isin(list(ANSWERS))).any():
            parts[1] = "**Components on what the agent answers:** not looked at.\n"
        if claims.empty:
            nearest = self.best(variant, 1).iloc[0]
            parts.append(
                f"No influence of one thing on another beats chance. The most consistent one, "
                f"{nearest['source']} on {target_words(nearest['target'])} "
                f"{when_words(nearest['lag'])}, agrees in "
                f"{percent(nearest['agreement'])} of the samples (corrected "
                f"{p_words(nearest['p_corrected'])}).\n")
        return "\n".join([*parts, self._persistence(rows), self._whole(variant)])

    def components(self) -> list[str]:
        """Return the names of the components in the listed claims, ordered by number."""
        names = []
        for variant in self.variants:
            for _, row in self.claims(variant).head(MOST_LISTED).iterrows():
                names += [row["source"], row["target"]]
        return sorted({name for name in names if name not in ANSWERS},
                      key=lambda name: int(name.split()[1]))

    def _of(self, variant: str) -> pd.DataFrame:
        return self._table[self._table["env_grads"] == variant]

    def _list(self, claims: pd.DataFrame, heading: str) -> str:
        if claims.empty:
            return f"**{heading}:** none is claimed.\n"
        lines = [f"**{heading}:**\n"]
        for _, row in claims.head(MOST_LISTED).iterrows():
            lines.append(f"- {influence_sentence(row, self.counterpart(row))}")
        if len(claims) > MOST_LISTED:
            lines.append(f"- … and {len(claims) - MOST_LISTED} more, which agreement.csv lists.")
        return "\n".join(lines) + "\n"

    def _persistence(self, rows: pd.DataFrame) -> str:
        itself = rows[rows["claimed"] & (rows["source"] == rows["target"])]
        if itself.empty:
            return "**Components on themselves:** none is claimed.\n"
        counts = [f"{count} over {lag} step{'s' if lag > 1 else ''}"
                  for lag, count in itself.groupby("lag").size().items()]
        raising = int((itself["median_gradient"] > 0).sum())
        how = "all of them carry on" if raising == len(itself) else (
            f"{raising} carry on and {len(itself) - raising} turn round")
        return (f"**Components on themselves** (memory, which a recurrent state has in any case): "
                f"{', '.join(counts)}; {how}.\n")

    def _whole(self, variant: str) -> str:
        rows = self._matrices[self._matrices["env_grads"] == variant]
        shares = ", ".join(f"{percent(row['agreement'])} at lag {row['lag']}"
                           for _, row in rows.iterrows())
        beating = rows[rows["p_corrected"] <= self._level]["lag"].tolist()
        verdict = ("at no lag is that more than chance" if not beating else
                   f"that is more than chance at lag {', '.join(map(str, beating))}")
        return (f"**As a whole:** the median gradient has the sign of the cross-correlation in "
                f"{shares} of the pairs of different components; {verdict}.\n")


def _by_consistency(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.sort_values(["agreement", "effect"], ascending=False, kind="stable")
