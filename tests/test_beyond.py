"""What must lie beyond the edge of the view: worlds of a view, search, smallest change, study."""


import contextlib
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import BEYOND_FLAGS, BEYOND_STEPS, FLOAT32, SHIPPED, refusal

import record_gen_samples
from common.errors import UserError
from common.results import ResultStore
from generative import beyond
from generative.beyond_results import BEYOND, CHANGED, CONTROL, PLAUSIBLE, stored_worlds
from generative.dataset import RolloutDataset, WindowPlace
from generative.prior import Prior
from generative.prior_networks import NUM_GLOBALS
from generative.recorded_views import choose_views
from generative.sample_files import SampleFolder
from generative.squares import World
from generative.surroundings import (
    AIMS,
    DEATH,
    TURN,
    TURN_STEPS,
    VALUE,
    Candidates,
    Rollouts,
    View,
    certain,
    effects,
    evolve,
    smallest_change,
)
from tools import pictures

SEED = 3


@pytest.fixture(scope="module")
def recording(hard_recording):
    return hard_recording


@pytest.fixture(scope="module")
def simulator(shipped_simulator):
    return shipped_simulator


@pytest.fixture(scope="module")
def open_view(simulator, recording):
    def open_at(episode=0, frame=12, num_steps=4):
        return View.recorded(simulator, FLOAT32, recording, WindowPlace(episode, frame), SEED,
                             num_steps, 8)
    return open_at


def seeds(*numbers):
    return torch.tensor(numbers)


# Worlds of a view

def test_worlds_of_a_view_differ_only_where_nothing_is_seen(open_view):
    """All of them show the recorded frame at first, and objects do not reach into it."""
    view = open_view()
    worlds = view.worlds(view.noise(seeds(*range(8))))
    given = view.given
    assert 13 ** 2 <= given.sum() <= 16 ** 2
    assert (worlds.squares[:, given] == worlds.squares[:1, given]).all()
    assert (worlds.squares[:, ~given] != worlds.squares[:1, ~given]).float().mean() > 0.05
    assert (worlds.squares[:, given] == certain(view.world).squares[:, given]).all()
    frames, _, _ = view.films(worlds)
    assert (frames[0] == frames[0, :1]).all()
    assert (frames[-1] != frames[-1, :1]).any()


def test_given_squares_stay_when_the_others_are_redrawn(open_view):
    view = open_view()
    first, other = (view.worlds(view.noise(seeds(seed))) for seed in (1, 2))
    mask = view.differences(first, other)[0] & (np.arange(39) > 30)
    assert mask.sum() > 5
    again = view.worlds(view.noise(seeds(2)), first, mask)
    assert (again.squares[:, mask] == first.squares[:, mask]).all()
    assert (view.differences(again, first)[0] & ~mask).any()


def test_simulations_do_not_depend_on_the_batch_when_worlds_move_on(open_view):
    view = open_view(frame=3, num_steps=60)
    worlds = view.worlds(view.noise(seeds(1, 2)))
    both, (alone,) = view.simulate(worlds), [view.simulate(worlds[1:])]
    assert abs(both.moved).max() > 12 * view.pixels_per_square  # beyond the first world
    for one, other in zip(vars(both[[1]]).values(), vars(alone).values()):
        np.testing.assert_allclose(one, other, atol=2e-3)


def test_seen_squares_follow_the_camera(open_view):
    view = open_view()
    still = view.seen(np.zeros((3, 1, 2)))[0]
    assert not still.any()  # half a square around the view is given
    moved = np.zeros((3, 1, 2))
    moved[2, 0] = 5 * view.pixels_per_square, 0
    (seen,) = view.seen(moved)
    rows, columns = np.nonzero(seen)
    edge = np.flatnonzero(view.given.numpy().any(axis=0)).max()
    assert columns.min() == edge + 1 and 5 <= len(set(columns)) <= 6
    assert 13 <= len(set(rows)) <= 15
    assert view.distance(seen).min() >= 0.5


def test_shuffled_worlds_are_less_plausible_than_all_samples(open_view):
    view = open_view()
    worlds = view.worlds(view.noise(seeds(*range(16))))
    shuffled = beyond._shuffled(worlds[:1], view, 0)
    assert view.losses(shuffled)[0] > 5 * view.losses(worlds).max()


# Effects

def rollouts(**fields):
    default = {"values": np.zeros((8, 1)), "right": np.ones((8, 1)), "alive": np.ones((8, 1)),
               "death": np.zeros((8, 1)), "moved": np.zeros((8, 1, 2))}
    return Rollouts(**{**default, **{name: np.array(value, float)[:, None]
                                     for name, value in fields.items()}})


def test_effects_are_read_where_they_are_largest_and_the_agent_is_alive():
    plausible = rollouts()
    values = [0, 0, 1, -2, 0, 0, 0, 9]
    assert [part.item() for part in effects(VALUE, rollouts(values=values), plausible)] == [9, 7]
    dead = rollouts(values=values, alive=[1, 1, 1, 1, 1, 0.5, 0.1, 0.1], death=[0] * 7 + [0.9])
    assert [part.item() for part in effects(VALUE, dead, plausible)] == [-2, 3]
    assert effects(DEATH, dead, plausible)[0] == pytest.approx(0.9)
    assert effects(DEATH, plausible, dead)[0] == pytest.approx(-0.9)
    turned = rollouts(right=[1, 1, -1, -1, -1, -1, 1, 1])
    (effect,), (step,) = effects(TURN, turned, plausible)
    assert (effect, step) == (-2, 2)
    assert beyond.has_turned(turned, plausible, step)
    once = rollouts(right=[1, 1, 1, -1, 1, 1, 1, 1])
    assert effects(TURN, once, plausible)[0] == -2 / TURN_STEPS
    assert not beyond.has_turned(once, plausible, 0)


# Search

def test_the_search_finds_a_planted_optimum():
    """The score is a function of the world that a small prior generates: how many squares of an
    area have one class. It is compared with the best of as many random worlds."""
    torch.manual_seed(0)
    prior, num, squares, gains = Prior(23, 5, (8, 8, 8), 2, 3, 8), 384, np.s_[:, 5:15, 12:22], []
    seen = np.zeros((23, 23), bool)
    seen[squares[1:]] = True

    @torch.no_grad()
    def score(noise):
        rows = len(noise)
        world = World.of(torch.zeros(rows, 23, 23, 5), torch.zeros(rows, 2))
        found = prior.completed(world, torch.zeros(rows, 23, 23, dtype=torch.bool),
                                torch.zeros(rows, NUM_GLOBALS), noise)
        scores = (found.squares.argmax(dim=-1)[squares] == 2).float().mean(dim=(1, 2)).numpy()
        return Candidates(noise, scores, np.repeat(seen[None], rows, 0))

    for seed in (0, 1):
        random, first = (score(prior.place_noise(torch.arange(count) + 1000 * seed + begin))
                         for count, begin in ((num, 0), (num // 4, 500)))
        best = evolve(score, first, num, np.random.default_rng(seed))
        assert score(best.noise).scores == best.scores
        gains.append(best.scores[0] - random.scores.max())
    assert min(gains) > 0.02, gains


def test_the_search_evaluates_as_often_as_it_should_and_redraws_what_is_seen():
    shape, evaluated = (14, 39, 39), []
    seen = np.zeros((39, 39), bool)
    seen[20, 30] = True

    def score(noise):
        evaluated.extend(noise)
        return Candidates(noise, -noise[:, :, 20, 30].square().sum(dim=1).numpy(),
                          np.repeat(seen[None], len(noise), 0))

    generator = torch.Generator().manual_seed(0)
    first = score(torch.randn(10, *shape, generator=generator))
    best = evolve(score, first, 101, np.random.default_rng(0))
    assert len(evaluated) == 101 and best.scores.shape == (1,)
    children = torch.stack(evaluated[10:])
    changed = (children[:, None] != first.noise).any(dim=2)  # from each of the first
    assert changed.flatten(2).sum(dim=2).min(dim=1).values[:12].max() <= 81
    assert changed[:12, :, 20, 30].any(dim=1).all()
    assert not changed[..., 5, 5].all(dim=1).any()  # far from what is seen
    assert abs(children[:, :, 20, 31].std() - 1) < 0.2  # the score does not select here


# Smallest change

@pytest.mark.parametrize("rule, expected", [
    ("both", [(3, 30), (4, 33)]), ("either", [(4, 33)]), ("seen", [(3, 30)])])
def test_the_smallest_change_is_what_the_effect_needs(rule, expected):
    """Two squares of different groups, each within a block; or one of them."""
    different, seen = np.zeros((2, 39, 39), bool)
    different[2:4, 29:31] = different[4, 33] = different[30, 2:9] = True
    seen[:20] = True
    evaluated = []

    def effect(masks):
        evaluated.append(len(masks))
        first, second, far = masks[:, 3, 30], masks[:, 4, 33], masks[:, 30, 5]
        return {"both": 0.5 * (first & second) + 0.1 * masks[:, 2, 29],
                "either": 0.5 * (first | second) + 0.0, "seen": 0.5 * first + 0.1 * far}[rule]

    size = float(effect(different[None])[0])
    change = smallest_change(effect, different, seen, size)
    assert list(map(tuple, np.argwhere(change).tolist())) == expected
    assert effect(change[None])[0] >= 0.8 * size
    assert sum(evaluated) < 60


def test_squares_that_are_not_seen_stay_if_the_effect_needs_them():
    different, seen = np.zeros((2, 39, 39), bool)
    different[2, 2] = different[30, 30] = seen[2, 2] = True
    change = smallest_change(lambda masks: masks[:, 30, 30] * 1.0, different, seen, 1.0)
    assert np.argwhere(change).tolist() == [[30, 30]]


# Study

@pytest.fixture(scope="module")
def run(recording):
    def run_study(folder, *more):
        return beyond.main([*map(str, (*SHIPPED, "--data_dir", recording.path, "--output_dir",
                                       folder, *BEYOND_FLAGS, *more))])
    return run_study


@pytest.fixture(scope="module")
def study(beyond_study):
    return ResultStore(beyond_study, BEYOND)


def test_stored_worlds_have_the_effects_of_the_table(study, simulator, recording):
    table = study.read("table")
    assert table[["view", "aim"]].values.tolist() == [[view, aim] for view in (0, 1)
                                                      for aim in AIMS]
    for number, rows in table.groupby("view"):
        worlds, kinds, aims = stored_worlds(study, number)
        place = WindowPlace(*rows[["episode", "frame"]].iloc[0].tolist())
        view = View.recorded(simulator, FLOAT32, recording, place, int(worlds.seeds[0]),
                             BEYOND_STEPS, 32)
        assert (view.given.numpy() == study.read("worlds", number)["given"]).all()
        plausible = worlds[kinds == PLAUSIBLE]
        base, given = view.simulate(plausible), view.given.numpy()
        for row in rows.itertuples():
            changed = worlds[(kinds == CHANGED) & (aims == row.aim)]
            (effect,), _ = effects(row.aim, view.simulate(changed), base)
            assert effect == pytest.approx(row.effect, abs=2e-3)
            different = view.differences(changed, plausible)[0]
            assert different.sum() == row.num_squares <= row.num_different
            assert not (different & given).any()
            controls = worlds[(kinds == CONTROL) & (aims == row.aim)]
            assert len(controls.seeds) == 3 and view.differences(controls, plausible).any()
            size = effect if row.aim == DEATH else abs(effect)
            assert size >= 0.8 * row.searched - 2e-3


@pytest.mark.slow
def test_a_study_resumes(beyond_study, run, tmp_path):
    study = ResultStore(shutil.copytree(beyond_study, tmp_path / "beyond"), BEYOND)
    paths = [study.file_of("counterfactuals", 0), study.file_of("picture", 1)]
    before = [path.read_bytes() for path in paths]
    kept = study.file_of("worlds", 1).stat().st_mtime_ns
    for path in paths:
        path.unlink()
    assert run(study.path) == 0
    assert paths[1].read_bytes() == before[1]
    first, again = (pd.read_csv(path) for path in (study.file_of("counterfactuals", 0),) * 2)
    pd.testing.assert_frame_equal(first, again)
    assert paths[0].read_bytes() == before[0]
    assert study.file_of("worlds", 1).stat().st_mtime_ns == kept


def test_the_report_says_whether_the_search_beats_random_worlds():
    table = pd.DataFrame([{
        **dict.fromkeys(beyond.COUNTERFACTUAL, 0.5), "view": view, "level_seed": view,
        "near_end": True, "aim": aim, "effect": -1.0 if aim == VALUE else 1.0, "kinds": "1 x to y",
        "num_squares": 1, "searched": 1.0, "random": 0.2 if aim == DEATH else 1.2}
        for view in range(6) for aim in AIMS])
    summary = beyond.summarise(table, 0).set_index(["aim", "quantity"])
    assert summary.loc[(DEATH, "beats"), "mean"] == 1
    assert summary.loc[(TURN, "beats"), "mean"] == 0
    assert summary.loc[(VALUE, "effect"), "mean"] == 1
    text = beyond.report(table, summary.reset_index(), {
        "num_steps": 8, "num_evaluations": 9, "why_perhaps_trained_on": ""})
    assert "finds larger effects" in text.split("## The agent dies")[1].split("##")[0]
    assert "finds smaller effects" in text.split("## The agent turns")[1].split("##")[0]
    assert text.count("1 x to y") == 18
    assert text.split("\n\n")[2].startswith("In 18 of 18 searches")  # for the pipeline
    assert "33% of them (too few views to tell)" in text.split("\n\n")[2]


def test_half_of_the_views_are_near_an_end(recording):
    dataset = RolloutDataset(recording.path, 3, 8)
    views = choose_views(dataset, 6, 0)
    assert len({view.episode for view in views}) == 6
    assert [view.near_end for view in views] == [True, False] * 3
    for view in views:
        left = len(recording.episode(view.episode).frames) - 1 - view.frame
        assert 4 <= left <= 16 or not view.near_end
        assert view.frame >= 2 and left >= 4
    assert choose_views(dataset, 6, 1) != views
    with pytest.raises(UserError, match="only 6 views"):
        choose_views(dataset, 7, 0)


def test_a_simulator_without_worlds_is_refused(simulator_file, agent_path, tmp_path, capsys):
    assert "nothing lies beyond" in refusal(beyond.main, (
        "--agent_file", agent_path, "--model_file", simulator_file, "--data_dir", tmp_path,
        "--output_dir", tmp_path / "new"), capsys)


def test_the_film_shows_the_game_and_worlds_in_which_the_agent_lives_and_dies(
        recording, tmp_path, monkeypatch):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "data").symlink_to(recording.path)
    assert record_gen_samples.main([*map(str, (
        *SHIPPED, "--data_dir", recording.path, "--generated_data_dir", tmp_path / "worlds",
        "--num_samples", 3, "--num_worlds", 6, "--num_sim_steps", 13, "--sample_actions",
        "--no_videos", "--precision", "float32", "--device", "cpu"))]) == 0
    folder = SampleFolder(tmp_path / "worlds" / "informed_init")
    monkeypatch.setattr(pictures, "DIES_AFTER", 0)
    frames = []
    for ends in folder.stacked().terminals.max(axis=1).reshape(3, 6):
        monkeypatch.setattr(pictures, "ENDED", np.sort(ends)[-2:].mean())  # one world is the worst
        with contextlib.suppress(UserError):
            frames = frames or pictures.imagined_worlds(pictures.Shown(tmp_path, 0))
    assert len(frames) == 7 and len({frame.size for frame in frames}) == 1
    red = [(abs(np.asarray(frame).astype(int) - (220, 40, 30)) < 45).all(axis=-1).sum(axis=0) > 20
           for frame in frames]
    width = frames[0].width // 5
    assert not any(of_frame[:width].any() for of_frame in red)  # the game goes on
    dead = [red[-1][width * column:width * (column + 1)].any() for column in range(1, 5)]
    assert sum(dead) == 1
    with pytest.raises(UserError, match="no start in"):
        monkeypatch.setattr(pictures, "ENDED", 2.0)
        pictures.imagined_worlds(pictures.Shown(tmp_path, 0))
