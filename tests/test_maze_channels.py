"""Channels of maze agents: a planted channel that steers the agent is found, and no others."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, FULL, planted_policy, tiny_policy

from agents.agent_file import save_agent
from agents.hooks import patched
from agents.layers import find_layer
from common.errors import UserError
from envs.maze.state import stock_state
from interventions.partial_forward import PartialForward
from interventions.patches import SetTo
from maze import channels, retargeting, scrubbing
from maze.field.fields import both_facings
from maze.field.outcomes import Chain, path_probability
from maze.studies import claims
from maze.studies.channels import choose_channels, parse_channels
from maze.studies.claims import StudiesFolder, findings_of
from maze.studies.retargeting import CellPatch, RetargetedLevel, draw_targets
from maze.studies.vectors import LAYER

PLANTED, OTHER = 7, 20  # channels of LAYER
DOWN, UP, RIGHT = 3, 5, 7  # actions
LEVELS = ("--kind", "fork", "--size", "7:9", "--device", "cpu")


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """The file of an agent that goes up if the cheese is left of the diagonal, and right if it is
    below. The planted channel responds to yellow. The other channels respond to pixels with more
    blue than any pixel of the cheese: walls and mouse."""
    policy = planted_policy(PLANTED, (-1.2, 4.0, -4.0))
    embedder = policy.embedder
    row, column = torch.arange(64) // 8, torch.arange(64) % 8
    with torch.no_grad():
        embedder.block1.conv.weight[1:] = 0
        embedder.block1.conv.weight[1, 2, 1, 1] = 10
        embedder.block1.conv.bias[1] = -10 * 100 / 255
        embedder.block2.conv.weight[:, 1] = 0  # negative at the cheese; others read its ReLU
        policy.fc_policy.weight[UP, :64] = 1.5 * (7 - row > column)
        policy.fc_policy.weight[RIGHT, :64] = 1.5 * (7 - row < column)
        policy.fc_policy.bias.zero_()
        policy.fc_policy.bias[[DOWN, UP]] = np.log(3)  # three actions go left, and three right
    path = tmp_path_factory.mktemp("planted") / "model_0.pth"
    save_agent(path, policy, {})
    return path


@pytest.fixture(scope="module")
def channels_folder(agent, tmp_path_factory):
    folder = tmp_path_factory.mktemp("channels") / "out"
    assert channels.main(channel_arguments(agent, folder)) == 0
    return folder


def channel_arguments(agent, folder):
    return ["--agent_file", str(agent), "--output_dir", str(folder), *LEVELS, "--num_mazes", "10",
            "--layers", LAYER, "--factors", "0", "positive:-1", "--num_shuffles", "1",
            "--num_controls", "4"]


def retarget(agent, folder, chosen, *more):
    return retargeting.main(["--agent_file", str(agent), "--output_dir", str(folder), *LEVELS,
                             "--channels", str(chosen), "--num_mazes", "12", "--targets", "2",
                             "--control_targets", "2", "--value", "0.25", *more])


def scrub(agent, folder, chosen, *more):
    return scrubbing.main(["--agent_file", str(agent), "--output_dir", str(folder), *LEVELS,
                           "--channels", str(chosen), "--num_mazes", "10", "--num_squares", "2",
                           *more])


def test_channels_finds_the_planted_channel_alone(channels_folder):
    table = pd.read_csv(channels_folder / "channels.csv")
    assert set(table.loc[table["chosen"], "channel"]) == {PLANTED}
    cheese = table[(table["thing"] == "cheese") & (table["mapping"] == "published")
                   & (table["set"] == "reporting")].set_index("channel")
    assert cheese["tracks"][PLANTED] and cheese["hit_rate"][PLANTED] > 0.9
    assert cheese["hit_rate"].drop(PLANTED).max() == 0
    assert cheese["at"][PLANTED] > 0.5 > 0.1 > cheese["elsewhere"][PLANTED]
    # The other channels track walls and the mouse, so they could be chosen by mistake.
    walls = table[(table["thing"] != "cheese") & (table["channel"] != PLANTED)]
    assert walls["hit_rate"].max() > 0.5
    assert f"| {LAYER} | {PLANTED} |" in (channels_folder / "report.md").read_text()


def test_a_channel_is_chosen_that_tracks_the_cheese_and_shows_it_more_than_a_wall():
    rows = [(thing, "published", channel, tracks, contrast)
            for channel, tracks, contrast, wall in ((0, True, 2, 1), (1, True, 3, 1),
                                                    (2, True, 5, 6), (3, False, 9, 1))
            for thing, contrast in (("cheese", contrast), ("wall", wall))]
    scores = pd.DataFrame(rows, columns=["thing", "mapping", "channel", "tracks", "contrast"])
    scores["layer"] = LAYER
    assert choose_channels(scores, 5) == [(LAYER, 1), (LAYER, 0)]
    assert choose_channels(scores, 1) == [(LAYER, 1)]


def test_channels_are_chosen_on_other_levels_than_reported(agent, channels_folder, tmp_path):
    folder = shutil.copytree(channels_folder, tmp_path / "out")
    choosing = folder / "steps" / "choosing.csv"
    pd.read_csv(choosing).assign(tracks=False).to_csv(choosing, index=False)
    assert channels.main(channel_arguments(agent, folder)) == 0
    table = pd.read_csv(folder / "channels.csv")
    assert table.loc[table["set"] == "reporting", "tracks"].any() and not table["chosen"].any()
    assert "none was multiplied" in (folder / "report.md").read_text()


def test_multiplying_the_planted_channel_does_something_and_random_ones_nothing(channels_folder):
    table = pd.read_csv(channels_folder / "effects.csv")
    of = table[table["outcome"] == "log_odds"].set_index("condition")["effect"]
    planted = of[[f"channels {PLANTED} times 0",
                  f"channels {PLANTED} positive part times -1, negative 1"]]
    # Negative values are not read, so multiplying the positive part by -1 is like multiplying by 0.
    assert planted.max() < -0.3 and planted.iloc[1] == pytest.approx(planted.iloc[0])
    assert of.drop(planted.index).abs().max() < 1e-5
    assert not table.loc[table["control"], "claimed"].any()


def test_probes_say_that_the_cheese_is_in_its_cell(channels_folder):
    table = pd.read_csv(channels_folder / "probes.csv").set_index(["target", "metric"])
    assert table.loc[("cheese in the cell", "auc"), "score"] > 0.95
    assert table.loc[("cheese in the cell", "auc"), "shuffled"] < 0.8
    assert table.loc[("cheese in the cell", "accuracy"), "base"] == pytest.approx(15 / 16)


@pytest.mark.slow
def test_retargeting_works_with_the_planted_channel_alone(agent, channels_folder, tmp_path):
    assert retarget(agent, tmp_path, channels_folder / "channels.csv", "--move_cheese") == 0
    effects = pd.read_csv(tmp_path / f"{PLANTED}_to_0.25" / "effects.csv")
    own = effects[~effects["control"]]
    assert own["effect"].min() > 0.01 and own["claimed"].all()
    assert effects.loc[effects["pattern"] == "channels", "effect"][1:].abs().max() < 1e-5
    moved = pd.read_csv(tmp_path / "cheese" / "targets.csv")
    assert moved["path_patched"].mean() > moved["path_unpatched"].mean() + 0.01
    assert retarget(agent, tmp_path, OTHER, "--num_controls", "0") == 0
    targets = pd.read_csv(tmp_path / f"{OTHER}_to_0.25_controls_0" / "targets.csv")
    np.testing.assert_allclose(targets["exact_patched"], targets["exact_unpatched"], atol=1e-5)


@pytest.mark.slow
def test_scrubbing_supports_the_planted_channel_alone(agent, tmp_path):
    assert scrub(agent, tmp_path / "planted", PLANTED) == 0
    table = pd.read_csv(tmp_path / "planted" / "contrasts.csv")
    own = table[~table["control"]].set_index("outcome")
    assert own["supported"]["total_variation"] and own["supported"]["published_size"]
    assert table[table["control"]]["altered"].abs().max() < 1e-5
    means = pd.read_csv(tmp_path / "planted" / "scrubbing.csv").groupby(["set", "feature"]).mean(
        numeric_only=True)
    same, other = (means.loc[("hypothesis", each)] for each in ("same", "other"))
    assert same["total_variation"] < 0.02 < 0.1 < other["total_variation"]
    assert scrub(agent, tmp_path / "other", OTHER, "--sources", "per_channel", "--num_controls",
                 "2") == 0
    table = pd.read_csv(tmp_path / "other" / "contrasts.csv")
    assert table.loc[~table["control"], "altered"].abs().max() < 1e-5


@pytest.mark.parametrize("recurrent", [False, True])
def test_retargeted_fields_are_those_of_whole_patched_passes(recurrent):
    policy = tiny_policy(recurrent=recurrent, channels=FULL)
    policy.eval()
    state, layer = stock_state("easy", 1), find_layer(policy, LAYER)
    level = RetargetedLevel(PartialForward(policy, FLOAT32, LAYER), layer, state)
    bare = state.with_cheese(None)
    reachable = draw_targets(level.grid, None, np.random.default_rng(0))
    assert sorted([*reachable, level.grid.mouse]) == level.grid.squares()
    targets = draw_targets(level.grid, 3, np.random.default_rng(0))
    table = level.measure_targets(targets, CellPatch((3, 9), (2.0, 4.0), -0.2))
    with_cheese = level.measure_targets(targets, None)
    values = np.zeros(layer.shape)
    values[3], values[9] = 2, 4
    for place, target in enumerate(targets):
        set_cell = SetTo(LAYER, channels=(3, 9), cells=(level.cell(target),), value=values,
                      others=-0.2)
        with patched(policy, [set_cell]):
            fields = both_facings(policy, FLOAT32, bare)
        moved = both_facings(policy, FLOAT32, bare.with_cheese(target))
        for row, sides in ((table.loc[place], fields), (with_cheese.loc[place], moved)):
            exact = np.nan if recurrent else Chain.of(sides).reaching([target])[0]
            assert row["path_patched"] == pytest.approx(path_probability(sides[0], target),
                                                        rel=1e-3)
            assert row["exact_patched"] == pytest.approx(exact, rel=1e-3, abs=1e-9, nan_ok=True)
    assert table["path_patched"].ne(table["path_unpatched"]).all()


def test_strongest_are_those_with_the_best_contrast_where_they_were_chosen(tmp_path):
    policy, table = tiny_policy(channels=FULL), tmp_path / "channels.csv"
    layer = find_layer(policy, LAYER)
    rows = [(LAYER, channel, contrast, chosen) for channel, contrast, chosen in (
        (2, 1.0, True), (5, 3.0, True), (9, 2.0, True), (11, 9.0, False))]
    scores = pd.DataFrame(rows, columns=["layer", "channel", "contrast", "chosen"])
    pd.concat([scores.assign(set="choosing"), scores.assign(
        set="reporting", contrast=10 / scores["contrast"])]).to_csv(table, index=False)
    assert parse_channels([str(table)], None, policy, layer) == (2, 5, 9)
    assert parse_channels([str(table)], 2, policy, layer) == (5, 9)
    assert parse_channels([str(table), "30"], 1, policy, layer) == (5, 30)
    with pytest.raises(UserError, match="has no scores of embedder"):
        parse_channels([str(table)], None, policy,
                       find_layer(policy, "embedder.block3.res1.resadd"))


def test_where_no_channel_was_chosen_studies_say_so(agent, channels_folder, tmp_path):
    table = pd.read_csv(channels_folder / "channels.csv")
    chosen = tmp_path / "channels.csv"
    table.assign(chosen=False).to_csv(chosen, index=False)
    for study, main in ((claims.RETARGETING, retarget), (claims.SCRUBBING, scrub)):
        assert main(agent, tmp_path / study, chosen) == 0
        assert "was chosen" in (tmp_path / study / "nothing.md").read_text()
    found, reasons = findings_of(StudiesFolder(tmp_path))
    assert not found and all("no channel" in reasons[row] for row in (16, 17))
