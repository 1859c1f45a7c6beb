"""python -m attribution.saliency_checks: effects of removed objects in the real game, and their
predictions from the agent alone and through the simulator."""

import contextlib
import copy
import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, ROOT, bytes_of_files, killed_at

from agents.acting import run_policy
from agents.agent_file import load_agent
from agents.networks import PolicyOutput, to_images
from agents.outputs import outputs_named
from agents.replay import level_states
from agents.rollout_files import EpisodeArrays, RolloutWriter
from attribution import saliency_checks
from attribution.checking import prediction_scores
from attribution.checking.counterfactual_predictions import (
    BLACK,
    COUNTERFACTUAL,
    COUNTERFACTUAL_METHODS,
    EMPTIED,
    FILLINGS,
    SAMPLED,
    counterfactual_predictions,
    mean_of_pairs,
    touched_blocks,
)
from attribution.checking.effect_predictions import (
    REPEATED,
    SIMULATOR_METHODS,
    Scene,
    agent_names,
    agent_predictions,
    simulator_predictions,
)
from attribution.checking.object_effects import (
    Pair,
    choose_pairs,
    measure_effects,
    replay_pairs,
)
from attribution.checking.prediction_report import HEADLINE, randomisation_table
from attribution.checking.prediction_scores import (
    CARRIED,
    CONSTANT,
    Effects,
    constant_sign,
    pair_counts,
    score_predictions,
)
from attribution.layers import find_bottlenecks
from attribution.recordings import Recording
from common.files import sha256
from common.parameters import ParameterSet
from envs.objects import objects_of, single_objects
from envs.procgen_env import EnvConfig, LevelSlots, StateView
from envs.wide_view import WorldView
from generative.config import SimulatorConfig
from generative.networks import LatentSampler
from generative.rendered_worlds import world_of_images
from generative.simulator import Simulator
from generative.world_data import fit_worlds
from stats.report import format_interval

OUTPUTS = outputs_named(["value", "taken"])
EASY, HARD = EnvConfig("coinrun", "easy"), EnvConfig("coinrun", "hard")
LEVELS, ROWS, INITIAL = range(20, 32), 18, 3
KINDS = [kind for kind in objects_of("coinrun") if kind.name not in ("wall", "agent")]
MODE = LatentSampler("mode")


@pytest.fixture(scope="module")
def policy(agent_path):
    return load_agent(agent_path).requires_grad_(False)


def record_scripted(folder, agent_path, config, levels):
    """Record the first frames of levels, in which the agent takes scripted actions."""
    policy = load_agent(agent_path)
    writer = RolloutWriter(folder, {"env": vars(config), "agent_sha256": sha256(agent_path)})
    actions = np.array([7, 8, 7, 5, 7, 8, 7, 7, 8, 7, 1, 7, 8, 7, 7, 5, 7, 4])
    for number, level in enumerate(levels):
        frames, states = [], [policy.initial_states(1)]
        with contextlib.closing(LevelSlots(config, 1)) as slots:
            slots.start(0, level)
            for action in actions:
                frames.append(slots.frames[0].copy())
                states.append(run_policy(policy, FLOAT32, slots.frames, states[-1]).hidden_states)
                if slots.step(0, action)[1]:
                    break
        length = len(frames)
        frames[-1] = np.zeros_like(frames[-1])
        writer.add(number, EpisodeArrays(
            np.stack(frames), torch.cat(states).numpy(), np.zeros((length, 15), np.float32),
            pd.DataFrame({"level_seed": level, "episode_step": np.arange(length),
                          "done": np.arange(length) == length - 1, "reward": 0.0, "value": 0.0,
                          "action": actions[:length]})))
    return folder


@pytest.fixture(scope="module")
def data(agent_path, tmp_path_factory):
    return record_scripted(tmp_path_factory.mktemp("coinrun"), agent_path, EASY, LEVELS)


@pytest.fixture(scope="module")
def recording(data, policy, agent_path):
    return Recording(data, policy, agent_path)


@pytest.fixture(scope="module")
def pairs(recording):
    return [pair for episode in recording.lengths
            for pair in choose_pairs(recording, episode, KINDS, INITIAL, 4, 0)]


def test_pairs_show_each_kind_once_per_level(recording, pairs):
    names = [(pair.episode, pair.thing.kind.name) for pair in pairs]
    assert len(set(names)) == len(names) > 10
    for pair in pairs:
        assert INITIAL - 1 <= pair.row < recording.lengths[pair.episode] - 1
        ((_, state),) = level_states(recording.folder, pair.episode, [pair.row])
        assert state.to_bytes() == pair.state.to_bytes()
    again = choose_pairs(recording, 3, KINDS, INITIAL, 4, 0)
    assert [(pair.row, pair.thing.rank) for pair in again] == [
        (pair.row, pair.thing.rank) for pair in pairs if pair.episode == 3]


def test_effects_are_those_of_the_real_game(recording, policy, pairs):
    lags = (0, 1, 3)
    replays = replay_pairs(recording, pairs, max(lags))
    effects = measure_effects(policy, FLOAT32, replays, OUTPUTS, lags)
    assert np.isfinite(effects).mean() > 0.9
    view = StateView(EASY)
    for number, pair in list(enumerate(pairs))[::3]:
        recorded = recording.read(np.array([[pair.episode, row] for row in range(
            pair.row, min(pair.row + 4, recording.lengths[pair.episode]))]))
        others, own = [[], []], list(recorded.frames)
        following = level_states(recording.folder, pair.episode,
                             range(pair.row, pair.row + len(own)))
        for _, state in following:  # direct: the recorded states, without the object
            others[1].append(view.draw(pair.thing.undrawn_in(state).to_bytes()))
        view.set(pair.thing.removed_from(pair.state).to_bytes())
        for action in recorded.actions:  # total: the game goes on without the object
            state = view.state()
            others[0].append(view.draw(state))
            if view.step(int(action))[0]:
                break
        values = []
        for frames in (*others, own):
            hidden, values_of = torch.from_numpy(recorded.entering[:1]), []
            for frame, action in zip(frames, recorded.actions):
                result = run_policy(policy, FLOAT32, frame[None], hidden)
                hidden = result.hidden_states
                values_of.append([float(result.values),
                                  float(result.log_probs[0, int(action)])])
            values.append(values_of)
        for kind in range(2):
            for place, lag in enumerate(lags):
                found = effects[kind, :, place, number]
                if lag < len(values[kind]) and lag < len(values[2]):
                    np.testing.assert_allclose(
                        found, np.subtract(values[kind][lag], values[2][lag]), atol=1e-4)
                else:
                    assert np.isnan(found).all()
    view.close()


def test_removed_objects_no_longer_block_the_way(box_agent, box_run):
    """Where the player runs into a box or stands on it, only the total effect has another way."""
    agent, box = load_agent(box_agent).requires_grad_(False), KINDS[-1]
    recording = Recording(box_run / "data", agent, box_agent)
    for episode, length in recording.lengths.items():
        states = dict(level_states(recording.folder, episode, range(length)))
        for row in range(2, length - 4):
            x, y = (float(states[row].player[axis]) for axis in "xy")
            for thing in single_objects(states[row], box):
                entity = states[row].entities[states[row].entities["type"] == 20][thing.rank]
                if abs(entity["x"] - x - 0.5) > 0.8 or abs(entity["y"] - y + 0.5) > 0.8:
                    continue  # it is neither below nor to the right
                pair = Pair(episode, row, thing, [states[other] for other in range(
                    row - 2, row + 5)], INITIAL)
                replays = replay_pairs(recording, [pair], 4)
                if replays.both_going.all() and replays.apart[-1] > 0.1:
                    assert replays.apart[0] == 0  # the removal itself moves nothing
                    moved, hidden = ((frames[-1] != replays.recorded[-1]).any(axis=-1).mean()
                                     for frames in (replays.removed, replays.undrawn))
                    assert moved > 2 * hidden  # the whole view has moved
                    return
    pytest.fail("no box changes the player's way")


# An agent for which the answer is known: its value falls with the number of visible boxes.

@pytest.fixture(scope="module")
def box_scene(box_agent, box_run, noisy_recording):
    """Pairs of the agent that sees boxes alone, and a simulator that draws its worlds."""
    agent = load_agent(box_agent).requires_grad_(False)
    recording = Recording(box_run / "data", agent, box_agent)
    pairs = [pair for episode in list(recording.lengths)[:10]
             for pair in choose_pairs(recording, episode, KINDS, INITIAL, 2, 0)]
    images, _ = fit_worlds(noisy_recording, range(6), 39)
    torch.manual_seed(0)
    simulator = Simulator(dataclasses.replace(
        ParameterSet("tiny-spatial").get(SimulatorConfig), pixels_per_square=64 / 13,
        world_squares=39, square_classes=len(images.templates), object_looks=images.looks,
        prior_widths=(8, 8, 8, 8), agent_hidden_size=None), agent)
    simulator.squares.load_state_dict(images.state_dict())
    frames = recording.read(np.array([[0, row] for row in range(8)])).frames
    simulator.basis.fit(torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255)
    replays = replay_pairs(recording, pairs, 2)
    with contextlib.closing(WorldView(HARD)) as view:
        scene = Scene.of(pairs, replays, recording.folder, view)
    return agent, simulator.requires_grad_(False).eval(), scene


def kinds_of(scene):
    return np.array([pair.thing.kind.name for pair in scene.pairs])


def part_of(scene, pairs):
    """Return a scene of some of the pairs, all of which count as different frames."""
    return Scene([scene.pairs[pair] for pair in pairs],
                 dataclasses.replace(scene.replays, **{
                     field.name: np.take(getattr(scene.replays, field.name), pairs,
                                         axis=0 if field.name == "entering" else 1)
                     for field in dataclasses.fields(scene.replays)}),
                 np.arange(len(pairs)), *(dataclasses.replace(
                     worlds, images=worlds.images[pairs], positions=worlds.positions[pairs],
                     objects=[worlds.objects[pair] for pair in pairs], clock=worlds.clock[pairs])
                     for worlds in (scene.worlds, scene.worlds_without)), "coinrun")


def test_only_boxes_have_effects_on_an_agent_that_sees_boxes_alone(box_scene):
    agent, _, scene = box_scene
    effects = measure_effects(agent, FLOAT32, scene.replays, OUTPUTS[:1], (0, 1, 2))[:, 0]
    boxes = kinds_of(scene) == "box"
    assert boxes.sum() >= 4 and (~boxes).sum() >= 4
    # The agent sees the number of cells with boxes, so a box next to another may not count.
    assert (effects[:, :, boxes] > 1e-3).mean() > 0.3
    assert (effects[:, :, boxes] < -1e-3).mean() < 0.1  # a box may hide something else
    assert np.nanmax(np.abs(effects[:, :, ~boxes])) < 1e-3


def test_the_agent_alone_predicts_the_planted_effects(box_scene):
    agent, _, scene = box_scene
    layers = find_bottlenecks(agent, ["block2"])
    effects = measure_effects(agent, FLOAT32, scene.replays, OUTPUTS[:1], (0, 1))[0, 0]
    names = agent_names(layers)
    found = dict(zip(names, agent_predictions(agent, FLOAT32, layers, OUTPUTS[:1], (0, 1),
                                              scene)[:, 0]))
    boxes = (kinds_of(scene) == "box") & (effects[0] > 1e-2)
    assert boxes.sum() >= 3
    for name, predicted in found.items():
        assert predicted.shape == (2, len(boxes))
        if not name.endswith("gradient"):  # which does not depend on what is there
            assert (predicted[:, boxes] >= 0).all(), name
            if name.startswith("pixels"):  # a cell may also show a box next to the object
                assert (predicted[:, boxes] > 0).mean() > 0.7, name
                assert np.abs(predicted[:, kinds_of(scene) == "saw"]).max(initial=0) < 1e-2, name
    np.testing.assert_allclose(found["pixels: occlusion"][0, boxes], effects[0, boxes], rtol=0.3)


def test_integrated_gradients_of_the_whole_frame_are_complete(recording, policy, pairs):
    few = pairs[:3]
    replays = replay_pairs(recording, few, 1)
    whole = dataclasses.replace(replays, initial_undrawn=255 - replays.initial)  # mask: all pixels
    scene = Scene(few, whole, np.arange(3), None, None, "coinrun")
    names = agent_names(())
    found = dict(zip(names, agent_predictions(policy, FLOAT32, (), OUTPUTS, (0,), scene)))
    np.testing.assert_allclose(found["pixels: integrated gradients"],
                               found["pixels: occlusion"], rtol=0.1, atol=2e-3)


def test_the_simulators_finite_difference_predicts_the_planted_effects(box_scene):
    agent, simulator, scene = box_scene
    simulator = copy.deepcopy(simulator)
    with torch.no_grad():
        simulator.decoder.keep.bias.fill_(-20)  # images show the world and nothing else
    found = dict(zip(SIMULATOR_METHODS, simulator_predictions(
        simulator, FLOAT32, OUTPUTS[:1], (0,), scene)[:, 0, 0]))
    (effects,) = measure_effects(agent, FLOAT32, scene.replays, OUTPUTS[:1], (0,))[0, 0]
    boxes = (kinds_of(scene) == "box") & (effects > 1e-2)
    difference = found["simulator: finite difference"]
    assert boxes.sum() >= 3 and (difference[boxes] > 0).mean() > 0.7
    others = np.abs(difference[kinds_of(scene) != "box"])
    assert np.median(others) < 0.1 * np.median(difference[boxes])
    # Boxes are in the squares alone, so gradients with respect to the frames do not see them.
    for name in ("finite difference (frames)", "gradient", "gradient x input"):
        small = np.median(np.abs(found[f"simulator: {name}"][boxes]))
        assert small < 0.1 * np.median(difference[boxes])
    assert (found["simulator: gradient x removal"][boxes] > 0).mean() > 0.5


def test_predictions_read_the_blocks_that_the_box_around_an_object_touches():
    mask = np.zeros((64, 64), bool)
    mask[15, 40], mask[20, 33] = True, True  # rows 15 to 20, columns 33 to 40
    assert touched_blocks(mask, 2).tolist() == [2, 6]
    assert touched_blocks(mask, 1).tolist() == [12, 13, 20, 21]
    mask[15, 40] = False
    assert touched_blocks(mask, 1).tolist() == [20]


def test_the_effects_of_blocks_are_averaged_for_each_pair():
    effects = np.arange(12.0).reshape(1, 2, 6)
    found = mean_of_pairs(effects, np.array([0, 0, 1, 2, 2, 2]))
    np.testing.assert_allclose(found, [[[0.5, 2, 4], [6.5, 8, 10]]])


def test_blocks_without_boxes_predict_the_planted_effects(box_scene, monkeypatch):
    """Fillings that are empty predict what emptied blocks predict: a higher value without boxes."""
    agent, simulator, scene = box_scene
    simulator = copy.deepcopy(simulator)
    with torch.no_grad():
        simulator.decoder.keep.bias.fill_(-20)  # images show the world and nothing else
        simulator.prior.trained.fill_(1)
    boxes = kinds_of(scene) == "box"
    (effects,) = measure_effects(agent, FLOAT32, scene.replays, OUTPUTS[:1], (0,))[0, 0]
    scene = part_of(scene, np.concatenate([np.flatnonzero(boxes & (effects > 1e-2))[:3],
                                           np.flatnonzero(~boxes)[:1]]))
    boxes = kinds_of(scene) == "box"
    empty = simulator.squares.empty_class
    calls = []

    def completed(world, known, camera):
        calls.append(world.seeds)
        nothing = torch.zeros_like(world.squares)
        nothing[..., empty] = 1
        return dataclasses.replace(world, squares=torch.where(known[..., None], world.squares,
                                                              nothing))
    monkeypatch.setattr(simulator.prior, "completed", completed)
    found = dict(zip(COUNTERFACTUAL_METHODS, counterfactual_predictions(
        simulator, FLOAT32, OUTPUTS[:1], (0,), scene)[:, 0]))
    assert boxes.sum() >= 3
    for filled, emptied, black in zip(COUNTERFACTUAL, EMPTIED, BLACK):
        np.testing.assert_allclose(found[filled], found[emptied], atol=1e-5)
        for name in (emptied, black):
            assert (found[name][0, boxes] > 0).mean() > 0.7, name
            assert found[name][0].min() > -0.05, name  # nothing that is emptied lowers the value
    # Larger blocks hold other boxes, too.
    assert found[EMPTIED[0]][0].sum() > found[EMPTIED[1]][0].sum()
    assert not np.allclose(found[SAMPLED[0]], found[COUNTERFACTUAL[0]], atol=1e-4)
    seeds = [seed for call in calls for seed in call.tolist()]
    assert len(set(seeds)) > FILLINGS * len(scene.pairs)


def test_gradients_through_the_simulator_are_derivatives(box_scene):
    """Central differences along the removal of an object, of an agent without kinks."""
    _, simulator, scene = box_scene
    lags, pairs = (0, 2), np.flatnonzero(kinds_of(scene) == "box")[:2]
    part = part_of(scene, pairs)
    found = dict(zip(SIMULATOR_METHODS, simulator_predictions(
        simulator, FLOAT32, OUTPUTS[:1], lags, part)[:, 0]))
    images = to_images(torch.from_numpy(part.replays.initial).flatten(0, 1), False).unflatten(
        0, part.replays.initial.shape[:2])
    masks = torch.from_numpy(part.replays.masks)[:, :, None]

    def values(initial):
        seeds = torch.tensor([1000003 * pair.episode + pair.row for pair in part.pairs])
        with torch.no_grad():
            world = world_of_images(simulator, simulator.encode(images), part.worlds, "coinrun",
                                    seeds)
            start = dataclasses.replace(
                simulator.start_from(simulator.encode(initial), MODE, world=world),
                agent_hidden=torch.from_numpy(part.replays.entering))
            steps = simulator.imagine(start, MODE, 3,
                                      true_actions=torch.from_numpy(part.replays.actions))
        return np.stack([steps[lag].values.double().numpy() for lag in lags])

    step = 1e-2
    slope = (values(images + step * masks) - values(images - step * masks)) / (2 * step)
    np.testing.assert_allclose(found["simulator: gradient"], -slope, rtol=0.1,
                               atol=0.1 * np.abs(slope).max() + 1e-4)


def test_saliency_of_the_frame_itself_is_the_agents_gradient_at_the_simulated_image(
        recording, pairs, simulator):
    few = pairs[:2]
    replays = replay_pairs(recording, few, 2)
    scene = Scene.of(few, replays, recording.folder, None)
    found = dict(zip(SIMULATOR_METHODS, simulator_predictions(
        simulator, FLOAT32, OUTPUTS, (0, 2), scene)))
    images = to_images(torch.from_numpy(replays.initial).flatten(0, 1), False).unflatten(
        0, replays.initial.shape[:2])
    with torch.no_grad():
        start = simulator.start_from(simulator.encode(images), MODE)
        image = simulator.imagine(start, MODE, 1, true_actions=torch.from_numpy(
            replays.actions[:1]))[0].images
    image.requires_grad_()
    result = simulator.agent.step(image, torch.from_numpy(replays.entering))
    value = OUTPUTS[0](PolicyOutput(result.logits, result.values, result.hidden_states), None)
    (gradient,) = torch.autograd.grad(value.sum(), image)
    shown = gradient * torch.from_numpy(replays.masks[-1])[:, None]
    for name, factor in (("simulator: saliency", 1), ("simulator: saliency x image", image)):
        np.testing.assert_allclose(found[name][0, 0], -(shown * factor).sum(dim=(1, 2, 3)).detach(),
                                   rtol=1e-3, atol=1e-5)
    assert not np.allclose(found["simulator: saliency"][0, 1], found["simulator: saliency"][0, 0])
    frames, both = (found[f"simulator: finite difference{name}"] for name in (" (frames)", ""))
    np.testing.assert_array_equal(frames, both)  # there are no worlds


# Scores

def planted(number=200, seed=0):
    """Return planted effects of two kinds, and predictions: right, random, and reversed."""
    rng = np.random.default_rng(seed)
    effects = rng.normal(size=(2, 2, 2, number))
    effects[:, :, 1, ::5] = np.nan
    right = effects[0] + 0.01 * rng.normal(size=effects[0].shape)
    apart = np.zeros((2, number))
    apart[1, ::4] = 3
    return Effects(np.arange(number) // 2, np.where(np.arange(number) % 2, "coin", "saw"), effects,
                   apart, {"right": np.nan_to_num(right), "random": rng.normal(size=right.shape),
                           "reversed": -np.nan_to_num(right)}, ("value", "taken"), (0, 4))


def test_a_planted_predictor_is_right_and_a_random_one_is_not():
    scores, differences = score_predictions(
        planted(), [("right", "random"), ("right", CONSTANT)], 0)
    total = scores[(scores["effect"] == "total") & (scores["subset"] == "all")
                   & (scores["kind"] == "all")].set_index(["predictor", "output", "lag"])
    for output in ("value", "taken"):
        for lag, pairs in ((0, 200), (4, 160)):
            right, random, against = (total.loc[(name, output, lag)] for name in (
                "right", "random", "reversed"))
            assert right["pairs"] == pairs and right["levels"] == 100
            assert min(right["sign"], right["auc"], right["rank"]) > 0.97
            assert max(against["sign"], against["auc"]) < 0.03 and against["rank"] < -0.97
            assert random["sign_low_95"] < 0.5 < random["sign_high_95"]
            assert random["auc_low_95"] < 0.5 < random["auc_high_95"]
            assert random["rank_low_95"] < 0 < random["rank_high_95"]
    assert ("lag 0 carried forward", "value", 0) not in total.index
    assert total.loc[(CARRIED, "value", 4), "sign_low_95"] < 0.5
    found = differences[(differences["effect"] == "total") & (differences["kind"] == "all") & (
        differences["measure"] == "sign")]
    assert (found["low_95"] > 0.3).all() and (found["p_holm"] < 0.05).all()


def test_a_predictor_does_not_differ_from_another_random_one():
    data = planted(100)
    data.predictions["other"] = np.random.default_rng(9).normal(size=(2, 2, 100))
    _, differences = score_predictions(data, [("other", "random")], 0)
    assert (differences["p_holm"] > 0.05).mean() > 0.9
    assert ((differences["low_95"] < 0) & (differences["high_95"] > 0)).mean() > 0.85


def test_pairs_are_counted_until_an_episode_ends_and_while_the_player_stays():
    data = planted()
    data.effects[0, 0, 0, :3] = 1e-6
    table = pair_counts(data).set_index(["effect", "subset", "kind", "lag"])
    assert table.loc[("total", "all", "all", 0), "pairs"] == 200
    assert table.loc[("total", "all", "all", 0), "no_effect_value"] == 3
    assert table.loc[("total", "all", "all", 4), "pairs"] == 160
    assert table.loc[("total", "all", "all", 4), "as_direct_value"] == 0
    assert table.loc[("total", "all", "coin", 4), "pairs"] == 80
    assert table.loc[("total", "same place", "all", 0), "pairs"] == 200
    assert table.loc[("total", "same place", "all", 4), "pairs"] == 120
    data.effects[1, 0, 0, :5] = data.effects[0, 0, 0, :5]
    assert pair_counts(data)["as_direct_value"].max() == 5
    scores, _ = score_predictions(data, [], 0)
    assert scores.query("effect == 'total' and subset == 'all' and kind == 'all' and lag == 0 and "
                        "output == 'value'")["pairs"].eq(197).all()


def test_constant_signs_come_from_other_levels():
    levels, kinds = np.arange(40) // 2, np.array(["coin", "saw"] * 20)
    effects = np.where(kinds == "coin", 1.0, -1.0)
    np.testing.assert_array_equal(constant_sign(effects, kinds, levels, 0), effects)
    changed = effects.copy()
    changed[levels == 7] *= -1
    found = constant_sign(changed, kinds, levels, 0)
    assert (found[levels == 7] == effects[levels == 7]).all()  # its own effects are not used


def test_random_weights_are_compared_by_signs_and_not_by_absolute_maps():
    """Maps of equal size with random signs fail to predict, though their sizes agree."""
    data = planted()
    rng = np.random.default_rng(2)
    own = np.stack(list(data.predictions.values()))[..., :150]  # (M, J, L, R)
    flipped = own * rng.choice([-1, 1], (6, *own.shape))
    table = randomisation_table(data, flipped, 0).set_index(["predictor", "output", "lag"])
    assert ((table["same_sign"] - 0.5).abs() < 0.08).all()
    row = table.loc[("right", "value", 0)]
    assert abs(row["sign_random"] - 0.5) < 0.08 and row["sign"] > 0.97
    same = randomisation_table(data, own[None], 0).set_index(["predictor", "output", "lag"])
    assert same.loc[("right", "value", 0), "sign_random"] > 0.97  # depends on nothing that was lost
    assert randomisation_table(data, own[:0][None], 0).empty


# The script

def arguments(agent_path, simulator_file, data, folder):
    return [*map(str, (
        "--agent_file", agent_path, "--model_file", simulator_file, "--interpreting_params_name",
        "tiny", "--data_dir", data, "--num_pairs", 8, "--num_randomised", 2, "--layers",
        "block3", "--device", "cpu", "--output_dir", folder))]


@pytest.mark.slow
def test_an_interrupted_study_is_resumed(agent_path, simulator_file, data, tmp_path, monkeypatch):
    monkeypatch.setattr(saliency_checks, "_LEVELS_PER_GROUP", 1)
    monkeypatch.setattr(saliency_checks, "DRAWS", 1)
    monkeypatch.setattr(prediction_scores, "_MIN_PAIRS", 6)
    whole, parts = (arguments(agent_path, simulator_file, data, tmp_path / name)
                    for name in ("whole", "parts"))
    assert saliency_checks.main(whole) == 0
    with killed_at(saliency_checks.Study, "group", 2), contextlib.suppress(KeyboardInterrupt):
        saliency_checks.main(parts)
    assert [path.name for path in (tmp_path / "parts" / "levels").iterdir()] == ["00000.npz"]
    assert saliency_checks.main(parts) == 0
    assert bytes_of_files(tmp_path / "parts") == bytes_of_files(tmp_path / "whole")
    tables = {name: pd.read_csv(tmp_path / "whole" / f"{name}.csv")
              for name in ("pairs", "scores", "differences", "randomisation")}
    names = [*agent_names(find_bottlenecks(load_agent(agent_path), ["block3"])),
             *SIMULATOR_METHODS]
    scores = tables["scores"]
    assert scores["predictor"].unique().tolist() == [*names, CONSTANT, CARRIED]
    assert tables["randomisation"]["predictor"].unique().tolist() == names
    assert tables["pairs"]["pairs"].max() == 8
    now = scores[(scores["effect"] == "total") & (scores["kind"] == "all") & (
        scores["lag"] == 0) & (scores["output"] == "value")].set_index("predictor")
    # Easy levels have no backgrounds here, so occlusion is the removal itself.
    assert now["sign"].filter(like="pixels: occlusion").min() > 0.9
    text = (tmp_path / "whole" / "report.md").read_text(encoding="utf-8")
    assert "8 pairs in" in text
    assert text.index("## Value: short version") < text.index("## Pairs")


def test_documented_numbers_are_those_of_the_stored_tables():
    stored = ROOT / "pretrained" / "coinrun_hard_simulator" / "saliency_checks"
    scores = pd.read_csv(stored / "scores.csv").set_index(["predictor", "output", "lag"])
    text = (ROOT / "docs" / "start_optimisation.md").read_text(encoding="utf-8")
    section = text.split("## Which map predicts the game?")[1]
    header, _, *documented = ([cell.strip() for cell in line.strip("|").split("|")]
                              for line in section.splitlines() if line.startswith("| "))
    lags = [int(title.removeprefix("lag ")) for title in header[1:]]
    assert len(documented) == len(HEADLINE) and {0, 4} <= set(lags) <= set(saliency_checks.LAGS)
    for label, *cells in documented:
        name = label.replace("agent alone", "pixels").replace("×", "x")
        for lag, cell in zip(lags, cells, strict=True):
            if cell != "–":
                row = scores.loc[(name, "value", lag)]
                assert cell == format_interval(row["sign"], row["sign_low_95"],
                                               row["sign_high_95"], ".2f"), (name, lag)
    prose = " ".join(section.replace("−", "-").split())
    differences = pd.read_csv(stored / "differences.csv").set_index(["predictor", "reference"])
    for compared in (("simulator: gradient x removal", REPEATED),
                     ("simulator: finite difference", REPEATED),
                     ("simulator: finite difference", CARRIED)):
        for row in differences.loc[[compared]].query(
                "output == 'value' and lag > 0 and lag in @lags").itertuples():
            numbers = format_interval(row.difference, row.low_95, row.high_95, ".2f")
            assert numbers.removesuffix(")") in prose, (compared, row.lag)
