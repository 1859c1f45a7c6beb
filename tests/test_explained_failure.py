"""The page that explains one failure, in the real game."""

import contextlib
import dataclasses
import re

import av
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT

from agents import load_agent, record
from agents.agent_file import AgentOrigin, save_agent
from agents.networks import build_policy
from analysis import explained_failure
from analysis.decision_results import UNAVOIDABLE, Case, decide
from analysis.decision_trials import DecisionStudy, recorded_start
from analysis.explained_failure import LEAD, ExplainOptions, explain
from common.errors import UserError
from envs.procgen_env import EnvConfig

AGENT = ROOT / "pretrained" / "coinrun_hard" / "model.pth"
JUMP_RIGHT = 8
FEW = {"num_tried": 2, "num_fresh": 4, "num_envs": 16}


@pytest.fixture(scope="module")
def jumper(tmp_path_factory):
    """An agent that always jumps to the right, and a recording of three of its episodes."""
    folder = tmp_path_factory.mktemp("jumper")
    policy = build_policy("nature", 64, recurrent=False, learned_initial_state=False)
    with torch.no_grad():
        policy.fc_policy.weight.zero_()
        policy.fc_policy.bias[:] = -100
        policy.fc_policy.bias[JUMP_RIGHT] = 0
    game = EnvConfig("coinrun", "hard")
    save_agent(folder / "agent.pth", policy, {}, AgentOrigin(**{
        name: getattr(game, name) for name in ("env_name", "distribution_mode",
                                               "use_backgrounds")}))
    return folder / "agent.pth", record(folder / "agent.pth", game, folder / "data",
                                        num_episodes=6, seed=3)


def film(path):
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.slow
def test_a_failure_is_explained_and_played_again(tmp_path, monkeypatch):
    """Fails if a version of the episode differs before the decision, if it is marked at another
    step, or if another action or object is played than the table names."""
    explanations, measured = [], explained_failure.explanation_of
    monkeypatch.setattr(explained_failure, "TRIES", 8)
    monkeypatch.setattr(explained_failure, "explanation_of", lambda *inputs: explanations.append(
        measured(*inputs)) or explanations[-1])
    folder = tmp_path / "page"
    summary = explain(ExplainOptions(agent_file=AGENT, output_dir=folder, **FEW))
    assert summary["class"] != UNAVOIDABLE and summary["best_rate"] > summary["taken_rate"]
    states = pd.read_csv(folder / "states.csv")
    taken = states[(states["step"] == summary["step"]) & (states["taken"] == 1)]
    assert str(summary["actions"][summary["step"]]) in taken["actions"].item().split()
    films = {path.stem: film(path) for path in (folder / "films").iterdir()}
    assert films.keys() >= {"happened", "action"}
    happened, other = (np.stack(films[name][:LEAD + 1]).astype(int)
                       for name in ("happened", "action"))
    inside = np.s_[:, 20:200, 20:-20]  # without the border, and the sign of the action
    assert np.abs(happened - other)[inside].mean() < 3
    for frames in (happened, other):
        red = frames[:, 2, :, 0] - frames[:, 2, :, 1]
        assert red[LEAD].mean() > 100 and red[:LEAD].mean() < 60
    assert films["happened"][-1].max() < 160 < films["happened"][LEAD + 1].max()  # darkened
    page = (folder / "index.html").read_text()
    assert len(re.findall(r'<video src="data:video/mp4;base64,[\w+/]{1000}', page)) == len(films)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert summary["answer"] in page and "no simulator was given (--model_file)" in page
    monkeypatch.setattr(explained_failure, "explanation_of", lambda *_: explanations[0])
    explain(ExplainOptions(agent_file=AGENT, output_dir=folder, **FEW))  # replaces its own output


def test_the_simulator_tries_the_same_actions(jumper, tmp_path):
    """Fails if an action is missing in the simulator, or a probability is not one."""
    _, recording = jumper
    options = ExplainOptions(
        agent_file=AGENT, model_file=ROOT / "pretrained/coinrun_hard_simulator/model.pt",
        output_dir=tmp_path, **FEW)
    config = explained_failure.game_of(options)
    policy = load_agent(AGENT)
    with contextlib.closing(DecisionStudy(
            policy, options.compute, config, options)) as study:
        steps = next(steps for steps in map(recording.steps, range(6))
                     if steps["reward"].sum() <= 0)
        case = Case(0, int(steps["level_seed"].iloc[0]), "saw", len(steps) - 2,
                                      steps["action"].tolist()[:-1])
        moments = study.replay(case)
        step = max(moments)
        actions = [group[0] for group in study.distinct_actions(moments[step].start.state)]
        start = recorded_start(policy, options.compute, config, case, step, step + 1)
        table, note = explained_failure._imagined(
            options, start, actions)
    assert note == "" and table["action"].tolist() == actions
    assert table["lives"].between(0, 1).all()


def test_recorded_failures_are_explained(jumper, tmp_path):
    agent, recording = jumper
    returns = {number: recording.steps(number)["reward"].sum() for number in range(6)}
    failed = [number for number, total in returns.items() if total <= 0]
    assert failed
    first = explain(ExplainOptions(agent_file=agent, data_dir=recording.path,
                                   output_dir=tmp_path / "page", **FEW))
    steps = recording.steps(failed[0])
    assert first["level_seed"] == steps["level_seed"].iloc[0]
    assert first["actions"] == steps["action"].tolist()[:-1]
    assert first["last_step"] == len(steps) - 2


def test_a_failure_that_nothing_prevents_has_a_page(jumper, tmp_path):
    """All continuations die, and no object is in view."""
    agent, recording = jumper
    options = ExplainOptions(agent_file=agent, data_dir=recording.path, output_dir=tmp_path, **FEW)
    policy, config = load_agent(agent), explained_failure.game_of(options)
    case = explained_failure.find_failure(policy, config, options)
    with contextlib.closing(DecisionStudy(policy, options.compute, config, options)) as study:
        found = explained_failure.explanation_of(study, case, policy, config, options)
    states = found.states.replace({"fresh": r"\+", "tried": r"\+"}, "-", regex=True)
    lost = dataclasses.replace(
        found, states=states, step=int(states["step"].min()), decision=decide(states, case),
        objects=found.objects[:0], films=found.films[:1])
    assert lost.decision["class"] == UNAVOIDABLE
    assert f"None of the {states['step'].nunique()} measured states" in lost.answer
    assert "at most 0 %" in lost.answer and "No object is in view" in lost.spared
    lost.write(tmp_path, "agent")
    page = re.sub(r"base64,[^\"]*", "", (tmp_path / "index.html").read_text())
    assert page.count("<video") == 1 and "point of no return" not in page and "nan" not in page


def test_errors_say_why_there_is_nothing_to_explain(jumper, tmp_path):
    agent, recording = jumper
    solved = [number for number in range(6) if recording.steps(number)["reward"].sum() > 0]
    assert solved
    for options, message in (
            ({"data_dir": recording.path, "episode": solved[0]}, "is no failure within 500 steps"),
            ({"episode": 1}, "give --data_dir"),
            ({"data_dir": recording.path, "level_seed": 1}, "either --level_seed or --data_dir"),
            ({"level_seed": int(recording.steps(solved[0])["level_seed"].iloc[0])},
             "does not fail in 32 episodes on level"),
            ({"env_name": "maze", "distribution_mode": "easy"}, "not of maze")):
        with pytest.raises(UserError, match=message):
            explain(ExplainOptions(agent_file=agent, output_dir=tmp_path / "page", **FEW,
                                   **options))
    with pytest.raises(UserError, match="an agent other than"):
        explain(ExplainOptions(agent_file=AGENT, data_dir=recording.path,
                               output_dir=tmp_path / "page", **FEW))
