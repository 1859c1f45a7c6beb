"""Plain-language descriptions of the claimed influences in a behaviour, as Markdown.

All numbers come from the tables of ``analysis/dynamics_grads_consistency_plots.py``;
``analysis/influences/consistency.py`` defines when an influence is claimed.

Letters in shape comments: I independent components (ICs).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from agents.outputs import ANSWERS
from analysis.influences.comparison import WITH, WITHOUT
from analysis.influences.gradients import ANSWER_NAMES
from analysis.steps import ENDED
from common.game_constants import NUM_ACTIONS
from generative.sample_files import SampleArrays

MOST_LISTED = 10  # largest number of influences in one list on a page
# "on average" is added if a smaller share of the samples has the sign of the median gradient.
STEADY = 0.9


def target_words(target: str) -> str:
    """Return the readable name of a target, from its name in the tables."""
    return f"the {ANSWER_NAMES[target]}" if target in ANSWERS else target


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def describe_samples(rows: np.ndarray, samples: SampleArrays, ics: np.ndarray, step: int,
                     action_labels: Sequence[str]) -> str:
    """Describe a group of samples: most likely actions, mean value, numbers of samples with an end
    of the episode and with a reward, and the ICs whose mean over the group is most unusual.

    Args:
        rows: indices of the group's n samples among all M samples (n,); unusual ICs are left out if
            the group contains all samples.
        samples: all samples; arrays have the leading dimensions (M, T).
        ics: coordinates of the ICs in all samples (M, T, I).
        step: step at which actions, values and ICs are read: the one at which the saliency
            functions were evaluated.
        action_labels: names of the actions in the game.
    """
    likeliest = np.bincount(samples.log_probs[rows, step].argmax(axis=-1), minlength=NUM_ACTIONS)
    most = np.argsort(-likeliest, kind="stable")[:3]
    actions = ", ".join(f"{action_labels[i]} in {likeliest[i]}" for i in most if likeliest[i])
    text = (f"{len(rows)} of {len(ics)} samples ({percent(len(rows) / len(ics))}). "
            f"At step {step} the agent's most likely action is {actions} of them; its mean value "
            f"estimate is {samples.values[rows, step].mean():.2f}. "
            f"The episode ends in {(samples.terminals[rows] > ENDED).any(axis=1).sum()} of the "
            f"samples, and {(samples.rewards[rows] > 0.5).any(axis=1).sum()} contain a reward.")
    if len(rows) < len(ics):
        here, everywhere = ics[rows, step].mean(axis=0), ics[:, step].mean(axis=0)
        spread = np.maximum(ics[:, step].std(axis=0), np.finfo(np.float32).tiny)
        unusual = np.argsort(-np.abs(here - everywhere) / spread)[:3]
        text += (" The components whose means at that step differ most from those of all samples "
                 "are "
                 + ", ".join(f"IC {i} (mean {here[i]:+.2f}, all samples {everywhere[i]:+.2f})"
                             for i in unusual) + ".")
    return text


def influence_sentence(row: pd.Series, other: pd.Series | None) -> str:
    """Describe one influence and its evidence.

    Args:
        row: row of ``agreement.csv``.
        other: row of the same influence for the other kind of gradient: without gradients through
            the environment if ``row`` is with them, and vice versa. None if not computed.
    """
    verb = "raises" if row["median_gradient"] > 0 else "lowers"
    steady = "" if row["steadiness"] >= STEADY else ", on average"
    text = (f"**{row['source']} {verb} {target_words(row['target'])} at lag {row['lag']}{steady}.**"
            f" The median gradient is {row['median_gradient']:+.2f} (mean {row['gradient']:+.2f}; "
            f"of that sign in {percent(row['steadiness'])} of the samples), the cross-correlation "
            f"{row['cross_correlation']:+.2f}. Gradient and deviations agree in "
            f"{percent(row['agreement'])} of the samples; after shuffling, they agree in half "
            f"(corrected p = {row['p_corrected']:.3g}). One standard deviation of "
            f"{row['source']} moves the target by {row['effect']:.2f} standard deviations; "
            + _explanation(row["explained"]))
    if other is not None:
        kind = f"{other['env_grads']} gradients through the environment"
        text += (f" It is also claimed {kind} (median gradient "
                 f"{other['median_gradient']:+.2f})."
                 if other["claimed"] else
                 f" It is not claimed {kind} (median gradient "
                 f"{other['median_gradient']:+.2f}, agreement {percent(other['agreement'])}, "
                 f"corrected p = {other['p_corrected']:.3g}).")
    return text


def _explanation(share: float) -> str:
    if share <= 0:
        return ("but their covariance at that step has the opposite sign, so other influences "
                "outweigh this one.")
    if share > 1:
        return "this is more than their whole covariance, so other influences counteract this one."
    return (f"this accounts for {percent(share)} of their covariance."
            if share < 0.95 else "this accounts for about all of their covariance.")


class BehaviourInfluences:
    """Influences in one group of samples: all samples, or those of one behaviour.

    The argument ``variant`` of the methods selects the kind of gradient: WITH or WITHOUT gradients
    through the environment.

    Args:
        table: rows of ``agreement.csv`` for this group.
        matrices: rows of ``agreement_of_matrices.csv`` for this group.
        level: significance level of the comparison.
        min_samples: smallest number of samples for a test.

    Attributes:
        variants: kinds of gradient in the table, WITH or WITHOUT gradients through the environment.
        testable: whether the group has enough samples for a test.
    """

    def __init__(self, table: pd.DataFrame, matrices: pd.DataFrame, level: float,
                 min_samples: int):
        self._table, self._matrices = table, matrices
        self._level, self._min_samples = level, min_samples
        self.num_samples = int(table["samples"].iloc[0])
        self.variants = [kind for kind in (WITH, WITHOUT) if (table["env_grads"] == kind).any()]
        self.testable = self.num_samples >= min_samples

    def claims(self, variant: str) -> pd.DataFrame:
        """Return the claimed influences on targets other than the source, most consistent first."""
        best = self.best(variant)
        return best[best["claimed"]]

    def num_tested(self, variant: str) -> int:
        """Return the number of tested influences on targets other than the source."""
        return len(self.best(variant)) if self.testable else 0

    def best(self, variant: str) -> pd.DataFrame:
        """Return all influences on targets other than the source: claimed ones first, then the
        others, both sorted by descending agreement, then effect."""
        rows = self._table[(self._table["env_grads"] == variant)
                           & (self._table["source"] != self._table["target"])]
        return rows.sort_values(["claimed", "agreement", "effect"], ascending=False, kind="stable")

    def counterpart(self, row: pd.Series) -> pd.Series | None:
        """Return the row of the same influence for the other kind of gradient; None if it was not
        computed."""
        same = self._table[(self._table["env_grads"] != row["env_grads"])
                           & (self._table[["lag", "source", "target"]]
                              == row[["lag", "source", "target"]]).all(axis=1)]
        return same.iloc[0] if len(same) else None

    def text(self, variant: str) -> str:
        """Describe the claimed influences with one kind of gradient, as Markdown."""
        if not self.testable:
            return (f"Too few samples for a test ({self.num_samples}, but at least "
                    f"{self._min_samples} are needed); nothing is claimed.\n")
        best, (on_components, on_outputs) = self.best(variant), self._by_target(variant)
        parts = [self._list(on_components, "Components on other components"),
                 self._list(on_outputs, "Components on the agent's outputs")]
        if not best["target"].isin(list(ANSWERS)).any():
            parts[1] = "**Components on the agent's outputs:** not analysed.\n"
        if on_components.empty and on_outputs.empty:
            nearest = best.iloc[0]
            parts.append(
                f"No influence exceeds chance. The most consistent one, "
                f"{nearest['source']} on {target_words(nearest['target'])} at lag "
                f"{nearest['lag']}, agrees in {percent(nearest['agreement'])} of the samples "
                f"(corrected p = {nearest['p_corrected']:.3g}).\n")
        return "\n".join([*parts, self._persistence(variant), self._whole(variant)])

    def components(self) -> list[str]:
        """Return the names of all components in the influences that ``text`` lists for any kind of
        gradient, ordered by number."""
        listed = pd.concat([claims.head(MOST_LISTED) for variant in self.variants
                            for claims in self._by_target(variant)])
        return sorted({*listed["source"], *listed["target"]} - set(ANSWERS),
                      key=lambda name: int(name.split()[1]))

    def _by_target(self, variant: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the claims on other components, and those on the agent's outputs."""
        claims = self.claims(variant)
        on_outputs = claims["target"].isin(list(ANSWERS))
        return claims[~on_outputs], claims[on_outputs]

    def _list(self, claims: pd.DataFrame, heading: str) -> str:
        if claims.empty:
            return f"**{heading}:** none is claimed.\n"
        lines = [f"**{heading}:**\n"]
        for _, row in claims.head(MOST_LISTED).iterrows():
            lines.append(f"- {influence_sentence(row, self.counterpart(row))}")
        if len(claims) > MOST_LISTED:
            lines.append(f"- … and {len(claims) - MOST_LISTED} more, which agreement.csv lists.")
        return "\n".join(lines) + "\n"

    def _persistence(self, variant: str) -> str:
        table = self._table
        itself = table[(table["env_grads"] == variant) & table["claimed"]
                       & (table["source"] == table["target"])]
        if itself.empty:
            return "**Components on themselves:** none is claimed.\n"
        counts = ", ".join(f"{count} at lag {lag}"
                           for lag, count in itself.groupby("lag").size().items())
        num_positive = (itself["median_gradient"] > 0).sum()
        return (f"**Components on themselves** (expected, because the state is recurrent): "
                f"{counts}; {num_positive} keep their sign and {len(itself) - num_positive} "
                "reverse it.\n")

    def _whole(self, variant: str) -> str:
        rows = self._matrices[self._matrices["env_grads"] == variant]
        shares = ", ".join(f"{percent(row['agreement'])} at lag {row['lag']}"
                           for _, row in rows.iterrows())
        beating = rows[rows["p_corrected"] <= self._level]["lag"].tolist()
        verdict = ("this exceeds chance at no lag" if not beating else
                   f"this exceeds chance at lag {', '.join(map(str, beating))}")
        return (f"**As a whole:** the median gradient has the sign of the cross-correlation in "
                f"{shares} of the pairs of different components; {verdict}.\n")
