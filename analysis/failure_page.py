"""The page that explains a failure: results, sentences about them, and the files.

``analysis.explained_failure`` measures the results; ``templates/failure.html.j2`` is the page.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from analysis.decision_films import action_label
from analysis.decision_results import (
    MEANINGS,
    NOT_MEASURED,
    OUTCOMES,
    STATE,
    UNAVOIDABLE,
    Case,
    rate,
    state_rates,
)
from analysis.decision_trials import HORIZON
from common.files import versions
from common.page_files import templates
from common.results import Entry, File, Json, ResultStore, Schema, Table
from common.video import FULL_REWARD, enlarge, write_video
from stats.significance import share

NUM_WORLDS, IMAGINED_STEPS = 8, 24  # of the simulator
FPS = 5
ALIKE = 0.05  # probabilities that differ less are alike
OBJECT = {"kind": str, "number": int, "right": float, "up": float, "saved": str, "action": float,
          "value": float}
EXPLAINED = Schema("an explained failure", "explain_failure.py", results={
    "page": Entry("index.html", File()), "states": Entry("states.csv", Table(STATE)),
    "objects": Entry("objects.csv", Table(OBJECT)),
    "summary": Entry("explanation.json", Json()),
    "films": Entry("films/{}.mp4", File())}, replaced=True)


@dataclasses.dataclass(frozen=True)
class Film:
    """A version of the episode: its name, what is different in it, how it ends, and its frames."""

    name: str
    title: str
    end: str
    frames: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Results about one failure.

    Attributes:
        case: the episode.
        states: rows of STATE, for all measured states.
        step: the state that is explained: the point of no return, or the first measured state
            if no state is savable.
        decision: row of ``analysis.decision_results.decide``.
        objects: the objects in view in this state, one by one, and all objects of each kind:
            ``kind``; ``number`` of objects; ``right`` and ``up``: place of the (nearest) object in
            squares from the player; ``saved``: outcomes of continuations without the
            object; ``action`` and ``value``: probability of the action taken, and value of the
            agent, if the object is not drawn.
        free: outcomes of continuations from the state as it is.
        frame: what the agent saw, uint8 (64, 64, 3).
        films: versions of the episode.
        imagined: by distinct action, the share of imagined worlds in which the agent lives, and how
            likely; None without a simulator.
        note: why there is nothing about the simulator; "" if there is.
    """

    case: Case
    states: pd.DataFrame
    step: int
    decision: dict[str, Any]
    objects: pd.DataFrame
    free: str
    frame: np.ndarray
    films: Sequence[Film]
    imagined: pd.DataFrame | None
    note: str

    @property
    def chosen(self) -> pd.DataFrame:
        """Rows of the distinct actions in the explained state, the most likely first, with their
        ``label``; ``outcomes``; ``rate``, ``low`` and ``high``: share of saved continuations with
        its 95 % Wilson interval, NaN if the action was not tried; and ``lives``, see ``imagined``.
        """
        rows = self.states[self.states["step"] == self.step].sort_values(
            "probability", ascending=False)
        outcomes = rows["fresh"].where(rows["fresh"] != NOT_MEASURED, rows["tried"])
        rows = rows.assign(label=rows["actions"].map(action_label), outcomes=outcomes)
        rows[["rate", "low", "high"]] = [
            [np.nan] * 3 if text == NOT_MEASURED else _share(text) for text in outcomes]
        return rows.assign(lives=np.nan) if self.imagined is None else rows.merge(
            self.imagined, on="action")

    @property
    def answer(self) -> str:
        """The explanation in two or three sentences."""
        case, decision = self.case, self.decision
        text = f"The agent is killed by {_noun(case.cause)} at step {case.last}. "
        if decision["class"] == UNAVOIDABLE:
            best = state_rates(self.states)["best"]
            return text + (
                f"None of the {len(best)} measured states of the last {case.last - self.step + 1} "
                f"steps could be saved by one action: at most {100 * best.max():.0f} % of the "
                "continuations survive.")
        best, taken = (self.chosen[self.chosen[name] == 1].iloc[0] for name in ("best", "taken"))
        before = case.last - self.step
        when = "at the last step" if not before else f"{before} steps earlier" if before > 1 else (
            "one step earlier")
        return text + (
            f"The last decision that could have saved it came {when}: after {best['label']}, "
            f"{_percent(best['fresh'])} of the continuations survive. The agent took "
            f"{taken['label']} (probability {taken['probability']:.2f}), after which "
            f"{_percent(taken['fresh'])} do.")

    @property
    def summary(self) -> dict[str, Any]:
        """The explanation as values of JSON."""
        decision = {name: None if isinstance(value, float) and math.isnan(value) else
                    value.item() if isinstance(value, np.generic) else value
                    for name, value in self.decision.items()}
        return {"answer": self.answer, "step": self.step, "last_step": self.case.last,
                "seen": self.seen, "spared": self.spared, "simulator": self.simulated, **decision,
                "free_rate": rate(self.free), "actions": self.case.actions}

    @property
    def seen(self) -> str:
        """Sentence about the objects to which the policy responds in the explained state."""
        if self.objects.empty:
            return "No object is in view."
        taken = self.chosen[self.chosen["taken"] == 1].iloc[0]
        change = self.objects["action"] - taken["probability"]
        row = self.objects.loc[change.abs().idxmax()]
        if change.abs().max() < ALIKE:
            return (f"Hiding any of the objects in view changes the probability of "
                    f"{taken['label']} by at most {change.abs().max():.2f}: the policy does not "
                    "respond to them in this frame.")
        return (f"Of all objects in view, hiding {named(row)} in the frame changes the probability "
                f"of {taken['label']} most: from {taken['probability']:.2f} to "
                f"{row['action']:.2f}. The value changes from {taken['value']:.2f} to "
                f"{row['value']:.2f}.")

    @property
    def spared(self) -> str:
        """Sentence about the object whose removal saves most continuations."""
        if self.objects.empty:
            return "No object is in view that could be removed."
        row = self.objects.iloc[0]
        return (f"If the agent plays on from here as it is, {_percent(self.free)} of the "
                f"continuations survive; without {named(row)}, "
                f"{_percent(row['saved'])} do.")

    @property
    def simulated(self) -> str:
        """Sentence that compares the simulator with the game."""
        if self.imagined is None:
            return f"This part is left out, because {self.note}."
        rows = self.chosen
        dream, real = (rows.loc[rows[name].idxmax()] for name in ("lives", "rate"))
        text = (f"In {NUM_WORLDS} imagined worlds that continue the frame, the agent survives "
                f"{IMAGINED_STEPS} steps with probability {rows['lives'].min():.2f} to "
                f"{rows['lives'].max():.2f}, depending on the action")
        if rows["lives"].max() - rows["lives"].min() < ALIKE:
            return f"{text}: the simulator does not tell the actions apart."
        return (f"{text}. The best one is {dream['label']}, as in the game." if
                dream["action"] == real["action"] else
                f"{text}. The best one is {dream['label']}; in the game, it is {real['label']}.")

    def write(self, folder: Path, title: str) -> None:
        """Write all files of EXPLAINED but the settings."""
        files = ResultStore(folder, EXPLAINED)
        sources = {}
        for film in self.films:
            path = files.file_of("films", film.name)
            path.parent.mkdir(exist_ok=True)
            write_video(path, film.frames, fps=FPS)
            sources[film.name] = _data("video/mp4", path.read_bytes())
        self.states.to_csv(files.file_of("states"), index=False)
        self.objects.to_csv(files.file_of("objects"), index=False)
        files.schema.entry("summary").format.write(files.file_of("summary"), self.summary)
        rates, values = state_rates(self.states), self.states.groupby("step")["value"].first()
        template = templates(Path(__file__).parent / "templates").get_template("failure.html.j2")
        text = template.render(
            title=title, explanation=self, sources=sources, frame=_png(self.frame, 6),
            meaning=MEANINGS[self.decision["class"]], horizon=HORIZON,
            steps=[(self.case.last - step, row.best, row.taken, values[step] / FULL_REWARD)
                   for step, row in zip(rates.index, rates.itertuples())],
            actions=[*self.chosen.itertuples()], versions=versions())
        files.file_of("page").write_text(text, encoding="utf-8")


def _noun(cause: str) -> str:
    """Return the cause of a failure as words, such as "a saw"."""
    name = cause.split("_")[0]
    return {"lava": "lava", "multiple": "several objects", "other": "something else"}.get(
        name, f"a{'n' * (name[0] in 'aeiou')} {name}")


def named(row: pd.Series) -> str:
    """Return the objects of a row of ``Explanation.objects`` as words, such as "the 5 saws" or
    "the enemy 2.0 squares to the right"."""
    kind, right, up = row["kind"], row["right"], row["up"]
    if row["number"] > 1:
        return f"the {row['number']} {kind[:-1] + 'ies' if kind.endswith('y') else kind + 's'}"
    if abs(right) >= abs(up):
        return f"the {kind} {abs(right):.1f} squares to the {'right' if right > 0 else 'left'}"
    return f"the {kind} {abs(up):.1f} squares {'above' if up > 0 else 'below'}"


def _share(outcomes: str) -> tuple[float, float, float]:
    return share(outcomes.count(OUTCOMES[1]), len(outcomes))


def _percent(outcomes: str) -> str:
    """Return the share of saved continuations with its 95 % Wilson interval."""
    value, low, high = _share(outcomes)
    return f"{100 * value:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _png(frame: np.ndarray, factor: int) -> str:
    """Return a frame, enlarged, as a data address."""
    stream = io.BytesIO()
    Image.fromarray(enlarge(frame, factor)).save(stream, "PNG")
    return _data("image/png", stream.getvalue())
