"""Behaviour in mazes: regressions on synthetic tables, episodes of small networks, the script."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, figures_drawn, small_policy
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from agents.agent_file import save_agent
from agents.episodes import PlayOptions, play_episodes
from agents.goal_places import CheeseRegion
from common.results import ResultStore
from envs.maze.grid import FEATURES, FORK, Grid, fork_features
from envs.maze.state import MazeState, stock_state
from envs.procgen_env import EnvConfig
from maze import behaviour
from maze.field.fields import both_facings
from maze.field.outcomes import at_decision_square, reaching
from maze.studies import prediction
from maze.studies.behaviour import (
    BEHAVIOUR_FILES,
    CHEESE,
    EXACT_CHEESE,
    GOT,
    NEITHER,
    REGION,
    first_of,
    read_findings,
)

SETS = {"both": ("a", "b")}
LEVELS = ["--kind", "fork", "--size", "5:9", "--seed", "2", "--region", "3"]
NUM_LEVELS = 26


@pytest.fixture
def quick(monkeypatch):
    """Use few resamplings and subsets."""
    monkeypatch.setattr(prediction, "RESAMPLINGS", 6)
    monkeypatch.setattr(prediction, "NUM_SUBSETS", 8)


def made_up(num=120, seed=0):
    """Return features, a target, and its probability, which depends on the first feature."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(rng.normal(size=(num, 3)) * (1, 5, 0.2) + (3, 0, 7),
                         columns=["a", "b", "c"])
    probability = 1 / (1 + np.exp(-2 * (table["a"].to_numpy() - 2.5)))
    return table, (rng.random(num) < probability).astype(float), probability


def number(table, quantity, **where):
    """Return the only row of a table of regressions with a quantity and given values."""
    for name, value in where.items():
        table = table[table[name] == value]
    rows = table[table["quantity"] == quantity]
    assert len(rows) == 1
    return rows.iloc[0]


def test_scores_are_of_levels_not_fitted_and_standardised_by_those_that_were(quick):
    features, target, _ = made_up()
    features.iloc[7, 0] = 12  # an outlier, which changes mean and deviation of its folds
    table = prediction.regressions(features, {"got": target}, target > 0, 5, SETS)
    right, losses, base_right, base_losses = (np.empty(len(target)) for _ in range(4))
    for train, test in StratifiedKFold(10, shuffle=True, random_state=5).split(target, target):
        own = features["a"].to_numpy()
        mean, deviation = own[train].mean(), own[train].std()
        model = LogisticRegression().fit((own[train, None] - mean) / deviation, target[train])
        of_one = model.predict_proba((own[test, None] - mean) / deviation)[:, 1]
        for probability, hits, log_losses in ((of_one, right, losses), (
                np.full(len(test), target[train].mean()), base_right, base_losses)):
            hits[test] = (probability > 0.5) == (target[test] == 1)
            log_losses[test] = -np.log(np.where(target[test] == 1, probability, 1 - probability))
    for quantity, own, base, sign in (("accuracy", right, base_right, 1),
                                      ("log_loss", losses, base_losses, -1)):
        row = number(table, quantity, features="a")
        assert row["value"] == pytest.approx(own.mean())
        assert row["base"] == pytest.approx(base.mean())
        gain = number(table, f"{quantity}_gain", features="a")
        assert gain["value"] == pytest.approx(sign * (own - base).mean())
        error = (own - base).std() / np.sqrt(len(own))  # a plain interval agrees with the bootstrap
        assert gain[["low_95", "high_95"]].tolist() == pytest.approx(
            [gain["value"] - 1.96 * error, gain["value"] + 1.96 * error], abs=0.4 * error)


def test_a_planted_feature_is_found_and_a_shuffled_one_is_not(monkeypatch):
    monkeypatch.setattr(prediction, "RESAMPLINGS", 60)
    monkeypatch.setattr(prediction, "NUM_SUBSETS", 40)
    features, target, probability = made_up(400)
    features["shuffled"] = np.random.default_rng(9).permutation(features["a"])
    table = prediction.regressions(features, {"got": target, "exact": probability}, target > 0, 1,
                                   {"four": tuple(features)})
    for name in ("got", "exact"):
        found = table[table["target"] == name]
        for feature in features:
            for score in ("accuracy", "log_loss"):
                gain = number(found, f"{score}_gain", features=feature)
                is_claimed = gain["low_95"] > 0 and gain["p_holm"] <= 0.05
                assert is_claimed == (feature == "a"), (name, feature, score)
        assert number(found, "coefficient", model="set", feature="a")["low_95"] > 1
        shuffled = number(found, "coefficient", model="set", feature="shuffled")
        assert shuffled["low_95"] <= 0 <= shuffled["high_95"]
        assert number(found, "share_positive", feature="a")["value"] == 1


def test_a_probability_counts_as_so_many_ones_and_zeros(quick):
    features, _, probability = made_up()
    quarters = np.round(probability * 4) / 4
    table = prediction.regressions(features, {"exact": quarters}, probability > 0.5, 0, SETS)
    own = features["a"].to_numpy()
    rows = np.repeat((own - own.mean()) / own.std(), 4)[:, None]
    labels = (np.arange(4) < 4 * quarters[:, None]).ravel()
    plain = LogisticRegression(C=1 / 4, tol=1e-8).fit(rows, labels)
    assert number(table, "coefficient", model="single", features="a")["value"] == pytest.approx(
        plain.coef_[0, 0], rel=1e-3)


def test_coefficients_and_their_intervals_are_those_of_resampled_levels(quick):
    features, target, _ = made_up()
    table = prediction.regressions(features, {"got": target}, target > 0, 3, SETS)
    values = features[["a", "b"]].to_numpy()
    draws = np.random.default_rng(3).multinomial(120, np.full(120, 1 / 120), 6)

    def plain(counts):
        drawn, labels = np.repeat(values, counts, axis=0), np.repeat(target, counts)
        drawn = (drawn - drawn.mean(axis=0)) / drawn.std(axis=0)
        model = LogisticRegression(penalty="l1", solver="saga", tol=1e-7, max_iter=10_000)
        model.fit(drawn, labels)
        return [model.intercept_[0], *model.coef_[0]]

    whole = plain(np.ones(120, int))
    ends = np.quantile([plain(counts) for counts in draws], (0.025, 0.975), axis=0)
    for place, (quantity, feature) in enumerate((("intercept", "-"), ("coefficient", "a"),
                                                 ("coefficient", "b"))):
        row = number(table, quantity, model="set", feature=feature)
        assert row[["value", "low_95", "high_95"]].tolist() == pytest.approx(
            [whole[place], *ends[:, place]], abs=0.03)  # ours also shrinks the intercept


def test_variance_inflation_tells_collinear_features(quick):
    features, target, _ = made_up()
    rng = np.random.default_rng(4)
    features["close"] = features["a"] + 0.1 * rng.normal(size=120)
    features["given"] = features["b"] - 2 * features["c"]
    table = prediction.regressions(features, {"got": target}, target > 0, 0,
                                   {"three": ("a", "b", "close")})
    expected = np.linalg.inv(np.corrcoef(features[["a", "b", "close"]].T)).diagonal()
    for name, value in zip(("a", "b", "close"), expected):
        assert number(table, "vif", model="set", feature=name)["value"] == pytest.approx(value)
    assert np.isnan(number(table, "vif", model="all", feature="given")["value"])


def test_which_is_first_goes_by_the_path():
    grid = Grid.from_rows(["....#", ".##.#", ".#C..", ".#.#.", "M...#"])  # region: upper right 3x3
    inside = grid.region(3)
    up, right = [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0], [4, 1]], [[0, 0], [0, 1], [0, 2], [1, 2]]
    assert first_of([grid.world(*place) for place in up], grid, inside) == NEITHER
    up.append([4, 2])
    assert first_of([grid.world(*place) for place in [*up, [2, 2]]], grid, inside) == REGION
    right.append([2, 2])  # the cheese, which lies within the region
    assert first_of([grid.world(*place) for place in right], grid, inside) == CHEESE


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """A small untrained agent without memory, which walks at random."""
    policy = small_policy("nature", recurrent=False)
    with torch.no_grad():
        policy.fc_policy.weight /= 100
        policy.fc_policy.bias.fill_(-1.5)
        policy.fc_policy.bias[[1, 2, 7, 8]] = -3
        policy.fc_policy.bias[[0, 3]], policy.fc_policy.bias[[5, 6]] = -0.5, 0
    path = tmp_path_factory.mktemp("agent") / "model_0.pth"
    save_agent(path, policy)
    return path, policy


def arguments(agent, output, *more, num=NUM_LEVELS):
    return ["--agent_file", str(agent[0]), "--output_dir", str(output), "--num_mazes", str(num),
            "--device", "cpu", *LEVELS, "--exact", "--regress", *more]


@pytest.fixture(scope="module")
def finished(agent, tmp_path_factory):
    """Results and figures of a run."""
    output = tmp_path_factory.mktemp("behaviour") / "out"
    with pytest.MonkeyPatch.context() as patch, figures_drawn() as figures:
        patch.setattr(prediction, "RESAMPLINGS", 6)
        patch.setattr(prediction, "NUM_SUBSETS", 8)
        assert behaviour.main(arguments(agent, output)) == 0
    return ResultStore(output, BEHAVIOUR_FILES), figures


def test_rows_are_the_episodes_and_fields_of_their_levels(finished, agent):
    (folder, _), policy = finished, agent[1]
    table = folder.read("episodes")
    assert len(table) == NUM_LEVELS and 0 < table[GOT].sum() < NUM_LEVELS
    paths = folder.read("paths")
    assert paths["seeds"].tolist() == table["seed"].tolist()
    squares = np.split(paths["squares"], paths["lengths"].cumsum()[:-1])
    played = {episode.number: episode for episode in play_episodes(
        policy, FLOAT32, EnvConfig("maze", "easy"), list(enumerate(table["seed"][:8])), 2,
        16, PlayOptions(keep_frames=False))}
    moves = {**dict.fromkeys((0, 1, 2), (0, -1)), 3: (-1, 0), 5: (1, 0),
             **dict.fromkeys((6, 7, 8), (0, 1))}
    for row, path in zip(table[:8].itertuples(), squares):
        grid, episode = stock_state("easy", row.seed).grid, played[row.Index]
        assert (row.got_cheese, row.steps) == (episode.level_complete, episode.length)
        walked = [grid.start]
        for action in episode.actions[:-1]:
            beside = tuple(np.add(walked[-1], moves.get(int(action), (0, 0))))
            is_open = min(beside) >= 0 and max(beside) < 15 and grid.is_free[beside]
            walked.append(beside if is_open else walked[-1])
        walked = walked if row.got_cheese else walked[:-1]  # the last frame shows no level
        assert (path + grid.margin).tolist() == [list(square) for square in walked]
        assert row.kind == FORK and (row.maze_dim, row.cheese_row, row.cheese_column) == (
            grid.maze_dim, *grid.cheese)
        assert row.cheese_in_region == grid.region(3)[grid.cheese]
    row, state = table.iloc[5], stock_state("easy", int(table["seed"][5]))
    sides = both_facings(policy, FLOAT32, state)
    exact = reaching(sides, 3)
    assert row[[EXACT_CHEESE, "exact_cheese_first", "exact_region_first", "expected_steps"]].tolist(
        ) == pytest.approx([exact.cheese, exact.cheese_first, exact.region_first, exact.steps],
                           rel=1e-4)
    assert row["p_cheese"] == pytest.approx(at_decision_square(sides[0])["p_cheese"], rel=1e-4)
    assert row[list(FEATURES)].tolist() == pytest.approx(
        list(fork_features(state.grid).values()), rel=1e-5)
    deviation = np.sqrt((table[EXACT_CHEESE] * (1 - table[EXACT_CHEESE])).sum())
    assert abs(table[GOT].sum() - table[EXACT_CHEESE].sum()) < 3 * deviation


def test_findings_and_report_give_the_numbers_of_the_tables(finished):
    folder, figures = finished
    found, table = read_findings(folder.path), folder.read("episodes")
    forks = table[~table["cheese_in_region"]]
    success, exact = found[:2]
    assert (success.row, success.measure, success.num_levels) == (2, "gets the cheese", len(forks))
    ends = binomtest(int(forks[GOT].sum()), len(forks)).proportion_ci(method="wilson")
    assert [success.value, success.low_95, success.high_95] == pytest.approx(
        [forks[GOT].mean(), *ends], 1e-4)
    assert exact.value == pytest.approx(forks[EXACT_CHEESE].mean())
    assert not any(row.levels == "cheese anywhere" for row in found)  # the levels were selected
    firsts = [row.value for row in found if row.measure.startswith("first reached")]
    assert len(firsts) == 3 and sum(firsts) == pytest.approx(1)
    scores = [row for row in found if row.row == 4 and row.levels == "target: got the cheese"]
    assert len(scores) == 2 * len(FEATURES) and {row.row for row in found} == {2, 4, 5}
    regressions = folder.read("regressions")
    accuracies = regressions[(regressions["target"] == GOT) & (regressions["model"] == "single")
                             & (regressions["quantity"] == "accuracy")]
    assert scores[0].value == accuracies["value"].max()
    assert scores[0].base == accuracies["base"].iloc[0]
    text = folder.file_of("report").read_text()
    for each, end in ((success, ""), (scores[0], "; base")):
        assert f"{each.value:.3f} ({each.low_95:.3f} to {each.high_95:.3f}){end}" in text
    drawn = figures["episodes.png"].axes[0].lines
    assert drawn[1].get_xdata() == pytest.approx([table[GOT].mean()])


def test_a_folder_takes_fewer_levels_but_no_others(finished, agent, tmp_path, capsys):
    store = ResultStore(shutil.copytree(finished[0].path, tmp_path / "out"), BEHAVIOUR_FILES)
    few, table = arguments(agent, store.path, num=12), store.read("episodes")
    assert behaviour.main(few) == 0  # too few levels of either outcome for a regression
    assert "There are no regressions" in capsys.readouterr().out
    assert not store.has("regressions")
    pd.testing.assert_frame_equal(store.read("episodes"), table[:12])
    assert behaviour.main([*few, "--levels", ",".join(map(str, table["seed"][1:]))]) == 2
    assert "differs from the level that an earlier run" in capsys.readouterr().err


def test_cheese_is_confined_before_levels_are_chosen_and_played(agent, tmp_path):
    output = tmp_path / "out"
    assert behaviour.main(["--agent_file", str(agent[0]), "--output_dir", str(output), "--device",
                           "cpu", "--num_mazes", "3", "--cheese_region", "4", "--size", "5",
                           "--kind", "fork", "--region", "4"]) == 0
    table = ResultStore(output, BEHAVIOUR_FILES).read("episodes")
    for row in table.itertuples():
        played = CheeseRegion(4)(stock_state("easy", row.seed).to_bytes())
        assert (row.cheese_row, row.cheese_column) == MazeState.parse(played).grid.cheese
    assert table["cheese_in_region"].all() and table[EXACT_CHEESE].isna().all()
    assert [(row.row, row.value) for row in read_findings(output)] == [(1, table[GOT].mean())]


@pytest.mark.parametrize(("more", "message"), [
    (["--exact"], "leave --exact out"), (["--levels", "3", "3"], "levels have the same seed")])
def test_what_would_give_wrong_numbers_is_refused(agent_path, tmp_path, capsys, more, message):
    assert behaviour.main(["--agent_file", str(agent_path), "--output_dir", str(tmp_path / "out"),
                           "--device", "cpu", "--num_mazes", "3", *more]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
