"""python -m attribution.saliency_checks: both kinds of map, compared with the real game."""

import contextlib

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32

from agents.acting import run_policy
from agents.agent_file import load_agent
from agents.layers import Layer
from agents.outputs import outputs_named
from agents.replay import replayed
from agents.rollout_files import EpisodeArrays, RolloutFolder, RolloutWriter
from attribution import saliency_checks
from attribution.checking.saliency_comparison import (
    CHANCE,
    PIXELS,
    POINTS,
    TIMES_IMAGE,
    Map,
    agreements,
    attribution_maps,
    compare_agreements,
    deletion_table,
    frame_deletion_curves,
    hide_objects,
    simulated_maps,
)
from attribution.layers import Bottleneck, find_bottlenecks
from attribution.recordings import RecordedFrames
from common.files import sha256
from envs.objects import objects_of, undrawn
from envs.procgen_env import EnvConfig, LevelSlots, StateView
from generative.dataset import RolloutDataset
from generative.networks import LatentSampler
from generative.saliency.gradients import SaliencyFunction

(VALUE,) = outputs_named(["value"])
COINRUN = EnvConfig("coinrun", "easy")
LEVELS, ROWS = range(20, 32), 9
KINDS = objects_of("coinrun")


@pytest.fixture(scope="module")
def policy(agent_path):
    return load_agent(agent_path).requires_grad_(False)


@pytest.fixture(scope="module")
def data(policy, agent_path, tmp_path_factory):
    """The first frames of CoinRun levels, in which the agent takes scripted actions."""
    folder = tmp_path_factory.mktemp("coinrun")
    writer = RolloutWriter(folder, {"env": vars(COINRUN), "agent_sha256": sha256(agent_path)})
    actions = np.array([7, 8, 7, 5, 7, 8, 7, 7, 4])
    for number, level in enumerate(LEVELS):
        frames, states = [], [policy.initial_states(1)]
        with contextlib.closing(LevelSlots(COINRUN, 1)) as slots:
            slots.start(0, level)
            for action in actions:
                frames.append(slots.frames[0].copy())
                states.append(run_policy(policy, FLOAT32, slots.frames, states[-1]).hidden_states)
                slots.step(0, action)
        frames[-1] = np.zeros_like(frames[-1])
        writer.add(number, EpisodeArrays(
            np.stack(frames), torch.cat(states).numpy(), np.zeros((ROWS, 15), np.float32),
            pd.DataFrame({"level_seed": level, "episode_step": np.arange(ROWS),
                          "done": np.arange(ROWS) == ROWS - 1, "reward": 0.0, "value": 0.0,
                          "action": actions})))
    return folder


def rows_of(folder, places):
    files = {episode: RolloutFolder(folder).episode(episode) for episode, _ in places}
    return RecordedFrames(np.stack([files[episode].frames[row] for episode, row in places]),
                np.stack([files[episode].hidden_states[row] for episode, row in places]),
                np.array([files[episode].steps["action"].iloc[row] for episode, row in places]))


def test_saliency_of_the_frame_itself_is_the_agents_gradient_at_the_simulated_image(data,
                                                                                   simulator):
    dataset = RolloutDataset(data, 3, 3)
    windows = np.array([0, 12])
    drawn, times, later, _ = simulated_maps(simulator, FLOAT32, dataset, windows,
                                            SaliencyFunction("value"), (0, 2), 5, 5.0)
    assert [one.lag for one in (drawn, times, later)] == [0, 0, 2]
    images = dataset.batch(windows).frames[:3].float() / 255
    mode = LatentSampler("mode")
    with torch.no_grad():
        start = simulator.start_from(simulator.encode(images), mode)
        image = simulator.imagine(start, mode, 1)[0].images
    image.requires_grad_()
    (gradient,) = torch.autograd.grad(
        simulator.agent.step(image, start.agent_hidden).values.sum(), image)
    expected = (gradient * image).sum(dim=1).detach().numpy()
    np.testing.assert_allclose(times.values, expected, atol=1e-3 * np.abs(expected).max())
    assert drawn.values.sum() == pytest.approx(float(gradient.sum()), rel=0.1)  # smoothed
    assert np.abs(later.values - drawn.values).max() > 0.1 * np.abs(drawn.values).max()


def test_blocks_are_sums_over_the_pixels_that_cells_count_for(data, policy):
    (bottleneck,) = find_bottlenecks(policy, ["block2"])
    rows = rows_of(data, [(0, 3), (1, 4)])
    (one,) = attribution_maps(policy, FLOAT32, [bottleneck], VALUE, rows)
    assert one.values.shape == (2, 16, 16) and one.blocks.shape == (2, 8, 8)
    assert one.blocks[1, 2, 5] == pytest.approx(one.values[1, 4:6, 10:12].sum())
    pixels = Map("x", 0, PIXELS, np.arange(2 * 64 * 64.0).reshape(2, 64, 64))
    assert pixels.blocks[0, 1, 0] == pytest.approx(pixels.values[0, 8:16, :8].sum())


def test_hiding_an_object_changes_what_the_agent_sees_once(data, policy):
    places, folder = np.array([(0, 3), (0, 5), (2, 4)]), RolloutFolder(data)
    rows = rows_of(data, places)
    masks, changes, ended = hide_objects(policy, FLOAT32, folder, places, rows.entering, KINDS,
                                         VALUE, (0, 2))
    assert masks.shape == (3, len(KINDS), 64, 64) and not ended.any()
    view = StateView(COINRUN)
    for number, (episode, row) in enumerate(places):
        ((_, state),) = replayed(folder, episode, [row])
        for place, kind in enumerate(KINDS):
            picture = view.draw(undrawn(state, kind).to_bytes())
            seen = (picture != rows.frames[number]).any(axis=-1)
            np.testing.assert_array_equal(masks[number, place], seen)
            hidden = torch.from_numpy(rows.entering[number:number + 1])
            before, after = (run_policy(policy, FLOAT32, each[None], hidden)
                             for each in (rows.frames[number], picture))
            assert changes[0, number, place] == pytest.approx(
                float(after.values - before.values), abs=1e-4)
            if place:
                continue
            # Two steps later: the unchanged game continues, with the hidden state of each pass.
            values = []
            for output in (before, after):
                with contextlib.closing(LevelSlots(COINRUN, 1)) as slots:
                    slots.start(0, LEVELS[episode])
                    for action in folder.steps(episode)["action"].iloc[:row]:
                        slots.step(0, int(action))
                    for _ in range(2):
                        slots.step(0, int(output.logits.argmax()))
                        output = run_policy(policy, FLOAT32, slots.frames, output.hidden_states)
                values.append(float(output.values))
            assert changes[1, number, place] == pytest.approx(values[1] - values[0], abs=1e-4)
    view.close()
    assert (changes[0] != 0).any() and not changes[:, ~masks.any(axis=(2, 3))].any()


def test_deletion_begins_with_the_frame_and_ends_with_the_mean_one(data, policy):
    rows = rows_of(data, [(0, 3), (1, 4), (2, 2)])
    rng = np.random.default_rng(0)
    score = rng.random((3, 8, 8))
    curves = frame_deletion_curves(policy, FLOAT32, rows, [score, -score], VALUE)
    mean = np.broadcast_to(rows.frames.mean(axis=0).round().astype(np.uint8), rows.frames.shape)
    full, empty = (run_policy(policy, FLOAT32, each.copy(), torch.from_numpy(rows.entering)).values
                   for each in (rows.frames, mean))
    assert curves.shape == (3, 2, 2, POINTS)
    np.testing.assert_allclose(curves[:, 0, 0, 0], full, atol=1e-4)
    np.testing.assert_allclose(curves[:, 0, 0, -1], empty, atol=1e-4)
    # Insertion in the reversed order is deletion, traversed from its end.
    np.testing.assert_allclose(curves[:, 1, 1], curves[:, 0, 0, ::-1], atol=1e-4)
    first = np.argsort(-score[1].ravel())[:8]
    picture = rows.frames[1].copy()
    for block in first:
        at = np.s_[block // 8 * 8:block // 8 * 8 + 8, block % 8 * 8:block % 8 * 8 + 8]
        picture[at] = mean[1][at]
    one = run_policy(policy, FLOAT32, picture[None], torch.from_numpy(rows.entering[1:2]))
    assert curves[1, 0, 0, 1] == pytest.approx(float(one.values), abs=1e-4)


def planted(number=60, kinds=3):
    """Return masks, changes, maps with the correct sign everywhere, and maps of random sign."""
    rng = np.random.default_rng(1)
    masks = np.zeros((number, kinds, 64, 64), bool)
    for kind in range(kinds):
        masks[:, kind, 10 * kind:10 * kind + 8, 4:12] = True
    changes = rng.normal(size=(number, kinds))
    said = -(masks * changes[..., None, None]).sum(axis=1)
    noise = rng.normal(size=(number, 1, 1)) + 0.1 * rng.normal(size=(number, 64, 64))
    return masks, changes, said, noise


def test_agreement_is_the_share_of_right_signs():
    masks, changes, said, _ = planted()
    changes[5] = 0  # nothing changes
    changes[6, 1] = 0
    turned = said.copy()
    turned[7, 10:18] *= -1  # the second of three objects
    shifted = np.roll(said, -4, axis=0)
    for values, shift, expected in ((said, 0, 1), (-said, 0, 0), (shifted, 4, 1)):
        found = agreements(Map("x", 0, PIXELS, values), masks, changes, shift)
        assert np.isnan(found[5]) and (np.delete(found, 5) == expected).all()
    assert agreements(Map("partly", 0, PIXELS, turned), masks, changes)[7] == pytest.approx(2 / 3)


def test_a_planted_map_is_claimed_and_a_random_one_is_not():
    masks, changes, said, noise = planted()
    layer = Bottleneck("fine", Layer("fine", (1, 32, 32), 2, 0.0))
    right = said.reshape(60, 32, 2, 32, 2).sum(axis=(2, 4))
    maps = [Map("layer", 0, layer, right), Map("noise", 0, PIXELS, noise),
            Map("noise, 4 steps later", 4, PIXELS, noise)]
    table = compare_agreements(maps, masks, {0: changes, 4: changes}, np.arange(60) // 2, 0)
    own = table[~table["control"]].set_index(["map", "compared_with", "lag"])
    assert len(own) == 6
    for lag in (0, 4):
        row = own.loc[("layer", CHANCE, lag)]
        assert row["claimed"] and row["right"] == 1 and row["effect"] == 0.5
    for name, lag in (("noise", 0), ("noise, 4 steps later", 4)):
        assert not own.loc[(name, CHANCE, lag), "claimed"]
        against = own.loc[(name, "layer", lag)]
        assert against["claimed"] and against["effect"] < -0.3 and against["other"] == 1
    controls = table[table["control"] & (table["compared_with"] != CHANCE)]
    assert abs(controls["effect"].mean()) < 0.05  # both maps are shifted


def test_deletion_table_measures_in_deviations_of_the_output():
    rng = np.random.default_rng(0)
    curves = np.zeros((40, 3, 2, 5))
    curves[:, :, 0] = rng.normal(size=(40, 1, 1)) * 2
    curves[:, :, 1] = curves[:, :, 0]
    curves[:, 0, 0] -= 1  # deletion by the map is lower by 1, insertion higher by 3
    curves[:, 0, 1] += 3
    table = deletion_table(["map"], curves, np.arange(40) // 2, 0)
    deviation = curves[:, 0, 0, 0].std()
    assert table["better"].tolist() == pytest.approx([1 / deviation, 3 / deviation])
    assert table["above"].all()
    curves[:, 0] = curves[:, 1]
    assert not deletion_table(["map"], curves, np.arange(40) // 2, 0)["above"].any()


def test_report_and_tables_are_written(agent_path, simulator_file, data, tmp_path):
    folder = tmp_path / "checks"
    assert saliency_checks.main([*map(str, (
        "--agent_file", agent_path, "--model_file", simulator_file, "--interpreting_params_name",
        "tiny", "--data_dir", data, "--num_frames", 24, "--num_randomised", 1, "--layers",
        "block3", "--device", "cpu", "--output_dir", folder))]) == 0
    names = ["attribution to block3", "saliency", TIMES_IMAGE, "saliency, 2 steps later",
             f"{TIMES_IMAGE}, 2 steps later"]
    tables = {name: pd.read_csv(folder / f"{name}.csv")
              for name in ("objects", "deletion", "randomisation", "agreement")}
    for name, maps in (("objects", names), ("deletion", names[:3]), ("randomisation", names)):
        assert tables[name]["map"].unique().tolist() == maps
    assert tables["randomisation"]["drawn_again"].unique().tolist() == [
        "heads", "memory", "fc", "block3", "block2", "block1"]
    agreement = tables["agreement"]
    assert (agreement["effect"] - (agreement["right"] - agreement["other"])).abs().max() < 1e-4
    text = (folder / "report.md").read_text()
    assert all(name in text for name in names) and "24 frames of" in text
