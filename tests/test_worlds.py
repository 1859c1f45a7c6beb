"""Rendered worlds, their recordings, the classes of squares, and the prior over starts."""

import contextlib
import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, bytes_of_files, killed_at, record_arguments, refusal
from torch.nn import functional
from world_helpers import (
    ENEMY,
    HARD,
    PIXELS,
    PLAYER,
    SAW,
    TRAIL,
    corner_at,
    near,
    psnr,
    slope,
)

import record
from agents.replay import level_states
from agents.rollout_files import POSITION_COLUMNS, RolloutFolder, RolloutWriter
from agents.world_files import MOVING_COLUMNS
from common.errors import UserError
from common.game_constants import FRAME_SIZE, WORLD_SIZE
from envs.level_state import LevelState
from envs.objects import moving_objects
from envs.procgen_env import EnvConfig, LevelSlots
from envs.squares import square_keys, squares_around
from envs.wide_view import WorldView
from generative.config import GRID
from generative.prior_losses import draw_masks, world_loss
from generative.prior_networks import (
    EMBEDDING,
    NUM_GLOBALS,
    PriorNoise,
    StartPrior,
    WorldPrior,
)
from generative.squares import SquareImages, World
from generative.template_fit import TemplateFit
from generative.world_data import NUM_SQUARES, fit_worlds

RIGHT, JUMP_RIGHT = 7, 8
EPISODES = range(4)
BLANK = slice(FRAME_SIZE, 2 * FRAME_SIZE)  # rows or columns of the view in a world


# Rendering

def states(config, level, steps):
    """Yield frame and state after each step of a run to the right through a level."""
    rng = np.random.default_rng(level)
    with contextlib.closing(LevelSlots(config, 1)) as slots:
        slots.start(0, level)
        for _ in range(steps):
            if slots.step(0, int(rng.choice([RIGHT, JUMP_RIGHT])))[1]:
                return
            yield slots.frames[0].copy(), LevelState.parse(slots.state(0))


@pytest.mark.parametrize("config", [HARD, EnvConfig("coinrun", "easy", use_backgrounds=True)])
def test_a_worlds_centre_is_the_frame_without_moving_and_animated_objects(config):
    """Some of the hard levels have enemies or saws near the start."""
    gone = np.zeros(2)
    with contextlib.closing(WorldView(config)) as view:
        for level in (2, 5, 8):
            for frame, state in list(states(config, level, 30))[3::9]:
                world = view.draw(state)
                assert world.shape == (WORLD_SIZE, WORLD_SIZE, 3) and world.dtype == np.uint8
                different = (world[BLANK, BLANK] != frame).any(axis=-1)
                moving = near(state, [PLAYER, SAW, ENEMY, TRAIL])
                assert not (different & ~moving).any()
                assert (different & near(state, [PLAYER])).any()
                gone += [(different & near(state, [kind]) & ~near(state, [PLAYER])).any()
                         for kind in (SAW, ENEMY)]
                assert view.mismatch(state) < 2e-4
    assert gone.all() or config != HARD  # easy levels begin without them


def test_worlds_of_ninja_do_not_show_how_far_a_jump_is_charged():
    """The charge is a bar at the left edge of the frame."""
    config, charged = EnvConfig("ninja", "easy"), False
    with contextlib.closing(WorldView(config)) as view:
        for level in (0, 3, 4):
            for frame, state in list(states(config, level, 20))[3::5]:
                different = (view.draw(state)[BLANK, BLANK] != frame).any(axis=-1)
                assert not (different & ~near(state, [PLAYER]))[:, 6:].any()
                assert view.mismatch(state) < 2e-4
                charged |= different[:, :6].any()
    assert charged


def test_moving_and_animated_objects_are_enemies_and_saws(config=HARD):
    seen = set()
    for level in (2, 5, 8):
        for _, state in list(states(config, level, 12))[::5]:
            objects = moving_objects(state)
            entities = state.entities[np.isin(state.entities["type"], [SAW, ENEMY])]
            assert sorted((o.x, o.y, o.vx, o.image_type) for o in objects) == sorted(
                (e["x"], e["y"], e["vx"], e["image_type"]) for e in entities)
            assert all(o.kind == ("saw" if o.image_type in (2, 3) else
                                  "enemy_right" if o.vx > 0 else "enemy_left") for o in objects)
            seen |= {o.kind for o in objects}
    assert seen == {"saw", "enemy_left", "enemy_right"}


def test_games_whose_worlds_cannot_be_rendered_are_refused(monkeypatch, tmp_path, capsys):
    for game, mode in (("heist", "easy"), ("climber", "hard"), ("maze", "memory")):
        with pytest.raises(UserError, match=rf"camera of {game} in mode {mode} is not known to "
                                            r"follow.*coinrun, ninja, maze \(easy or hard\)"):
            WorldView(EnvConfig(game, mode))
    agent = ROOT / "pretrained" / "maze_confined" / "model.pth"
    argv = ["--agent_file", agent, "--env_name", "jumper", "--logdir", tmp_path, "--worlds"]
    assert refusal(record.main, argv, capsys).startswith("error: the camera of jumper")
    assert not (tmp_path / "data").exists()
    maze = EnvConfig("maze", "easy")

    # A wrong entry is found by comparing views.
    monkeypatch.setattr("envs.wide_view.CAMERA_FOLLOWS", {"maze"})
    with contextlib.closing(WorldView(maze)) as view:
        (_, state), = states(maze, 0, 1)
        with pytest.raises(UserError, match=r"the worlds of maze have seams: \d+\.\d % of the"):
            view.check(state)


def test_share_of_noisy_episodes_is_a_share(tmp_path, capsys):
    argv = record_arguments(tmp_path / "none.pth", tmp_path, 1, "--action_noise_share", "1.5")
    assert "must lie between 0 and 1, not 1.5" in refusal(record.main, argv, capsys)


# Recordings

def arguments(logdir, *more):
    argv = record_arguments(ROOT / "pretrained" / "coinrun_hard" / "model.pth", logdir, 4,
                            "--no_videos", "--distribution_mode", "hard", *more)
    argv[argv.index("--env_name") + 1] = "coinrun"
    argv[argv.index("--seed") + 1] = "8"
    return argv


WITH_WORLDS = "--worlds", "--action_noise_share", "0.5"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Recordings of the same four levels: with worlds, where every other episode has action noise;
    with action noise; and without."""
    logdir, folders = tmp_path_factory.mktemp("worlds"), []
    for name, more in (("worlds", WITH_WORLDS), ("noisy", ()), ("plain", ("--no_action_noise",))):
        assert record.main(arguments(logdir / name, *more)) == 0
        folders.append(RolloutFolder(logdir / name / "data"))
    return folders


def test_every_seventh_world_is_recorded(recordings):
    """Worlds and their moving and animated objects are those of a replay."""
    folder, num_moving = recordings[0], 0
    with contextlib.closing(WorldView(HARD)) as view:
        for episode in EPISODES:
            rows = list(range(0, len(folder.steps(episode)) - 1, 7))
            assert folder.world_rows(episode) == rows
            moving = folder.moving(episode)
            assert tuple(moving) == MOVING_COLUMNS and set(moving["row"]) <= set(rows)
            for row, state in level_states(folder, episode, rows[::2]):
                assert np.array_equal(folder.world(episode, row), view.draw(state))
                player = folder.steps(episode)[list(POSITION_COLUMNS)].to_numpy()[row]
                np.testing.assert_allclose(player, [state.player["x"], state.player["y"]])
                listed = moving[moving["row"] == row]
                entities = state.entities[np.isin(state.entities["type"], [SAW, ENEMY])]
                assert len(listed) == len(entities)
                for columns in (["x", "y"], ["vx", "vy"], ["image_type", "image_theme"]):
                    recorded = sorted(map(tuple, listed[columns].to_numpy()))
                    real = sorted(tuple(map(float, entity)) for entity in entities[columns])
                    np.testing.assert_allclose(recorded or [()], real or [()])
                num_moving += len(entities)
    assert num_moving


def test_every_other_episode_has_action_noise(recordings):
    worlds, noisy, plain = recordings
    for episode in EPISODES:
        mixed, same, other = (folder.episode(episode) for folder in (
            worlds, *((noisy, plain) if episode % 2 else (plain, noisy))))
        for name in ("frames", "hidden_states", "log_probs"):
            assert np.array_equal(getattr(mixed, name), getattr(same, name))
        assert np.array_equal(mixed.steps["action"], same.steps["action"])
        assert not np.array_equal(mixed.log_probs[0], other.log_probs[0])
    noise = record.mixed_noise(lambda logits: logits + 1, 0.3)
    info = record.BatchInfo(*np.array([np.arange(10)] * 3))
    changed = noise(torch.zeros(10, 15), info)[:, 0]
    assert changed.sum() == 3 and not changed[:3].any()  # evenly spread


def test_only_recordings_with_worlds_have_their_files_and_settings(recordings):
    worlds, noisy, plain = ({str(path.relative_to(folder.path)) for path in folder.path.rglob("*.*")
                             } for folder in recordings)
    own = {"idx_to_episode.csv", "recording.json"} | {
        name for episode in EPISODES for name in (
            f"data_gen_model_{episode:05d}.csv",
            *(f"episode_{episode:05d}/{array}.npy" for array in ("ob", "hx", "lp")))}
    assert noisy == plain == own
    assert worlds - own == {f"episode_{episode:05d}/{name}" for episode in EPISODES for name in (
        "moving.csv", *(f"world_{row:05d}.png" for row in recordings[0].world_rows(episode)))}
    settings = [set(json.loads(folder.description_file.read_text())) for folder in recordings]
    assert settings[1] == settings[2] == {
        "agent_file", "agent_sha256", "env", "seed", "precision", "log_probs_of", "action_noise",
        "swap", "interpreting_params_name", "versions", "contents"}
    assert settings[0] - settings[1] == {"worlds", "positions", "action_noise_share"}
    assert not settings[1] - settings[0]
    assert recordings[0].description()["worlds"] == 7


@pytest.mark.slow
def test_a_recording_with_worlds_can_be_resumed_and_replaced(recordings, tmp_path, capsys):
    with killed_at(RolloutWriter, "add", 3):
        assert record.main(arguments(tmp_path, *WITH_WORLDS)) == 130
    # Another thread may have finished a later episode.
    assert 2 <= len(list((tmp_path / "data").glob("episode_*"))) < 4
    assert record.main(arguments(tmp_path, *WITH_WORLDS)) == 0
    assert bytes_of_files(tmp_path / "data") == bytes_of_files(recordings[0].path)
    assert "worlds" in refusal(record.main, arguments(tmp_path), capsys)
    argv = arguments(tmp_path, "--overwrite")
    argv[argv.index("--num_episodes") + 1] = "1"
    assert record.main(argv) == 0
    assert not list(tmp_path.rglob("world_*.png")) and not list(tmp_path.rglob("moving.csv"))


@pytest.mark.parametrize("name", ["world_00007.png", "moving.csv"])
def test_the_digest_of_a_recording_covers_its_worlds(name, recordings, tmp_path):
    folder = RolloutFolder(shutil.copytree(recordings[0].path, tmp_path / "data"))
    assert folder.sha256(check_contents=True) == recordings[0].sha256()
    path = folder.episode_folder(1) / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    assert folder.sha256(check_contents=True) != recordings[0].sha256()


def test_damaged_worlds_are_named(recordings, tmp_path):
    folder = RolloutFolder(shutil.copytree(recordings[0].path, tmp_path / "data"))
    path = folder.episode_folder(0) / "world_00000.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match=r"world_00000\.png cannot be read as an image"):
        folder.world(0, 0)
    with pytest.raises(UserError, match=r"there is no file .*world_00001\.png"):
        folder.world(0, 1)


# Squares

@pytest.fixture(scope="module")
def fitted(recordings):
    return fit_worlds(recordings[0], EPISODES)


def recorded_images(folder, worlds):
    """Return the recorded images of worlds (N, 3, 192, 192)."""
    images = [folder.world(episode, row) for episode, row in zip(worlds.episodes, worlds.rows)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255


def test_recorded_worlds_consist_of_their_squares(recordings, fitted):
    images, worlds = fitted
    chosen = worlds[::3]
    real, classes = recorded_images(recordings[0], chosen), torch.from_numpy(chosen.squares).long()
    drawn = images(images.paint(World.of(classes, corner_at(chosen.positions))),
                   torch.zeros(len(real), 2), WORLD_SIZE)
    quality = [psnr(*pair) for pair in zip(drawn, real)]
    assert min(quality) > 27 and np.mean(quality) > 34, (min(quality), np.mean(quality))


def test_the_view_of_a_world_follows_the_camera(recordings, fitted):
    """Frames between two recorded worlds are drawn from the first, at the player's place."""
    images, worlds = fitted
    folder, quality = recordings[0], []
    for episode in (0, 2, 3):
        first = next(i for i, (other, row) in enumerate(zip(worlds.episodes, worlds.rows))
                     if other == episode and row == 14)
        rows = range(15, 21)
        world = World.of(torch.from_numpy(worlds.squares[first:first + 1]).long(),
                         corner_at(worlds.positions[first:first + 1]))
        places = folder.steps(episode)[list(POSITION_COLUMNS)].to_numpy(np.float32)[15:21]
        moved = (places - worlds.positions[first]) * np.float32([PIXELS, -PIXELS])
        assert abs(moved).max() > 1  # the player moves
        drawn = images(images.paint(world), torch.from_numpy(moved)).permute(0, 2, 3, 1)
        frames = torch.from_numpy(folder.episode(episode).frames[15:21] / np.float32(255))
        for image, frame, (_, state) in zip(drawn, frames, level_states(folder, episode, rows)):
            static = torch.from_numpy(~near(state, [PLAYER, SAW, ENEMY, TRAIL]))
            quality.append(psnr(image[static], frame[static]))
    assert min(quality) > 24 and np.mean(quality) > 29, (min(quality), np.mean(quality))


def test_positions_and_their_changes_are_those_of_the_steps(recordings, fitted):
    _, worlds = fitted
    for i in range(0, len(worlds.rows), 7):
        places = recordings[0].steps(worlds.episodes[i])[list(POSITION_COLUMNS)].to_numpy()
        row = worlds.rows[i]
        np.testing.assert_allclose(worlds.positions[i], places[row], rtol=1e-6)
        np.testing.assert_allclose(worlds.moved[i], places[row] - places[max(row - 1, 0)],
                                   atol=1e-5)


def test_squares_are_recognised_in_images(recordings, fitted):
    """Classes whose templates look alike, as empty squares and enemies' barriers, are one."""
    images, worlds = fitted
    chosen = worlds[::5]
    classes = torch.from_numpy(chosen.squares).long()
    world, known = images.read(recorded_images(recordings[0], chosen), corner_at(chosen.positions),
                               NUM_SQUARES, objects=False)
    assert known[:, 1:-1, 1:-1].float().mean() > 0.98
    looks = images.templates.flatten(1)
    alike = torch.cdist(looks, looks) < 0.015 * looks.shape[1] ** 0.5
    assert alike.float().mean() < 2 / len(looks)  # few classes look alike
    found = world.squares
    assert (found < images.sprites.first_class).all()
    assert alike[found, classes][known].float().mean() > 0.995
    rare = (classes != classes.mode().values.mode().values.mode().values) & known
    assert alike[found, classes][rare].float().mean() > 0.98


def test_views_recognise_only_their_squares(recordings, fitted):
    images, worlds = fitted
    view = recorded_images(recordings[0], worlds[:4])[:, :, BLANK, BLANK]
    _, known = images.read(view, corner_at(worlds.positions[:4]), NUM_SQUARES)
    middle, reach = NUM_SQUARES // 2, 7
    outside = torch.ones(NUM_SQUARES, NUM_SQUARES, dtype=torch.bool)
    outside[middle - reach:middle + reach + 1, middle - reach:middle + reach + 1] = False
    assert not known[:, outside].any()
    assert known[:, middle - 5:middle + 6, middle - 5:middle + 6].float().mean() > 0.95


def test_given_classes_are_found_again(recordings, fitted):
    images, worlds = fitted
    again, same = fit_worlds(recordings[0], EPISODES, given=images)
    looks = images.templates.flatten(1)
    assert again is images
    distance = (looks[same.squares.astype(int)] - looks[worlds.squares.astype(int)]).abs()
    assert distance.mean(dim=-1).max() < 0.06 and distance.mean() < 1e-3


def test_keys_of_squares_are_those_of_the_level():
    (_, state), = states(HARD, 2, 1)
    keys, outside = square_keys(state)
    height, padded = len(state.grid), np.pad(keys, 4, constant_values=outside)
    static = state.entities[~np.isin(state.entities["type"], [PLAYER, SAW, ENEMY, TRAIL])]
    for x, y in ((1.0, 2.25), *((entity["x"] - 0.2, entity["y"] - 0.4) for entity in static[:3])):
        row, column = height - math.ceil(y), math.floor(x)
        around = squares_around(keys, outside, float(x), float(y), 9)
        assert np.array_equal(around, padded[row:row + 9, column:column + 9])
        assert len(np.unique(around)) > 1 and len({*map(tuple, around)}) > 1
    filled = np.zeros(keys.shape, bool)  # squares with crates
    filled[height - 1 - static["y"].astype(int), static["x"].astype(int)] = True
    assert filled.any() and not np.isin(keys[filled], keys[~filled]).any()
    cells = state.grid[::-1][~filled]
    assert (cells == 19).any()  # barriers of enemies, which are not drawn
    cells = np.where(cells == 19, 100, cells)
    for cell in np.unique(cells):
        assert len(np.unique(keys[~filled][cells == cell])) == 1
    assert len(np.unique(keys[~filled])) == len(np.unique(cells))


def random_images(num_classes=5, pixels=PIXELS):
    images = SquareImages(num_classes, pixels)
    images.templates.copy_(torch.rand(images.templates.shape,
                                      generator=torch.Generator().manual_seed(0)))
    return images


def random_world(num_classes=5, num_squares=NUM_SQUARES, batch=2):
    generator = torch.Generator().manual_seed(1)
    squares = torch.randint(num_classes, (batch, num_squares, num_squares), generator=generator)
    return World.of(squares, corner_at(np.float32([[4.3, 7.9], [1.6, 2.2]])[:batch]))


def certain(world, num_classes=5):
    """Return a world with probabilities in place of class numbers."""
    return World.of(functional.one_hot(world.squares, num_classes).float(), world.corner)


def test_certain_classes_are_drawn_as_class_numbers():
    images, world = random_images(), random_world()
    displacement = torch.tensor([[3.3, -7.1], [-80.0, 90.0]])  # the second leaves the world
    for size in (FRAME_SIZE, 24):
        drawn = images(images.paint(world), displacement, size)
        assert drawn.shape == (2, 3, size, size)
        torch.testing.assert_close(drawn, images(images.paint(certain(world)), displacement, size))
    whole = images(images.paint(world), displacement)
    torch.testing.assert_close(drawn, whole[:, :, 20:44, 20:44])
    again = images(images.paint(world), displacement.repeat(3, 1))  # the worlds are repeated
    torch.testing.assert_close(again, whole.repeat(3, 1, 1, 1))


def test_a_pixel_has_the_colour_of_its_place_in_the_template():
    """With three positions per pixel on average, colours at known places are interpolated."""
    images, world = random_images(pixels=16.0), random_world()
    world = World.of(world.squares, torch.tensor([[-160.0, -144.0]] * 2))
    view = images(images.paint(world), torch.zeros(2, 2))
    for row, column in ((0, 0), (5, 40), (63, 17)):
        classes = world.squares[:, (144 + row) // 16, (160 + column) // 16]
        colour = images.templates[classes, row % 16, column % 16]
        torch.testing.assert_close(view[:, :, row, column], colour, atol=1e-4, rtol=0)


def test_gradients_of_images_agree_with_finite_differences():
    images, world, generator = random_images(), certain(random_world()), torch.Generator()
    weights = torch.randn(2, 3, FRAME_SIZE, FRAME_SIZE, generator=generator.manual_seed(2))
    displacement = torch.tensor([[3.3, -7.1], [0.4, 2.6]])

    def total(squares, displacement):
        scenery = images.paint(World.of(squares, world.corner))
        return (images(scenery, displacement).double() * weights).sum()

    inputs = world.squares.requires_grad_(), displacement.requires_grad_()
    gradients = torch.autograd.grad(total(*inputs), inputs)
    for i, step in ((0, 0.1), (1, 0.004)):  # linear; and linear between kinks
        for seed in range(3):
            direction = torch.randn(inputs[i].shape, generator=generator.manual_seed(seed))
            expected = float((gradients[i] * direction).sum())
            assert slope(total, inputs, i, direction, step) == pytest.approx(
                expected, rel=0.03, abs=0.03 * float(gradients[i].norm()))


@pytest.mark.parametrize(("right", "down"), [(1, 0), (0, 1), (-2, 3)])
def test_a_camera_that_moves_by_squares_sees_squares_that_moved(right, down):
    images, world = random_images(), random_world()
    displacement = torch.tensor([[0.7, 0.2], [-3.1, 8.4]])
    scenery = images.paint(world)
    moved = images(scenery, displacement + PIXELS * torch.tensor([right, down]))
    rolled = World.of(world.squares.roll((-down, -right), dims=(1, 2)), world.corner)
    torch.testing.assert_close(moved, images(images.paint(rolled), displacement), atol=2e-3, rtol=0)
    assert (moved - images(scenery, displacement)).abs().mean() > 0.1


def test_other_sizes_of_worlds_are_refused():
    with pytest.raises(UserError, match=r"must have the shape \(192, 192, 3\).*not \(65, 65, 3\)"):
        TemplateFit(PIXELS, NUM_SQUARES).add(0, np.zeros((65, 65, 3), np.uint8),
                                             np.zeros((39, 39), np.int64), 0.5, 0.5)


def test_a_recording_without_worlds_is_refused(recordings):
    with pytest.raises(UserError, match=r"has no worlds; record it with --worlds"):
        fit_worlds(recordings[1], [0])


# Prior

SIZE, CLASSES = 15, 3
TIMES = torch.linspace(0, 1, 9)[:-1]


def noise_of(num, seed=0, channels=2):
    generator = torch.Generator().manual_seed(seed)
    return PriorNoise(torch.randn(num, EMBEDDING, SIZE, SIZE, generator=generator),
                      torch.randn(num, NUM_GLOBALS, generator=generator),
                      torch.randn(num, channels, GRID, GRID, generator=generator),
                      torch.randn(num, SIZE, SIZE, generator=generator))


def small_prior():
    torch.manual_seed(0)
    prior = WorldPrior(SIZE, CLASSES, (16, 24, 32))
    with torch.no_grad():  # let every layer act
        for parameter in prior.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.05)
    return prior


def test_a_noisy_square_is_evidence_of_its_class():
    prior, squares = small_prior(), torch.randint(CLASSES, (2, SIZE, SIZE))
    inputs = (prior.embed(squares), torch.zeros(2, 1, SIZE, SIZE), torch.zeros(2, NUM_GLOBALS),
              torch.zeros(2, 1), torch.full((2,), 0.9))
    with torch.no_grad():
        right, without = ((prior(*inputs, *strongest)[0].argmax(dim=-1) == squares).float().mean()
                          for strongest in ((), (0.0,)))
    assert right == 1 and without < 0.9


def test_the_prior_keeps_what_is_given():
    prior, noise = small_prior(), noise_of(3)
    squares = functional.one_hot(torch.randint(CLASSES, (3, SIZE, SIZE)), CLASSES).float()
    known = draw_masks(3, SIZE, torch.Generator().manual_seed(0))[0]
    known[0, 0, 2:9, 3:8], known[1:] = 1, 0
    known[1, 0, :, 4] = 1
    camera = torch.randn(3, NUM_GLOBALS)
    camera[:, :4] = functional.normalize(camera[:, :4].unflatten(1, (2, 2)), dim=-1).flatten(1)
    with torch.no_grad():
        drawn, moved = prior.sample(noise, TIMES, squares, known, camera)
        again, _ = prior.sample(noise, TIMES, squares, known, camera)
        other, _ = prior.sample(noise_of(3, 1), TIMES, squares, known, camera)
        free, phase = prior.sample(noise, TIMES)
    mask = known[:, 0] > 0
    assert torch.equal(drawn[mask], squares[mask])
    torch.testing.assert_close(moved, camera)
    assert torch.equal(drawn, again) and not torch.allclose(drawn[~mask], other[~mask], atol=1e-3)
    torch.testing.assert_close(drawn.sum(dim=-1), torch.ones(3, SIZE, SIZE))
    assert not torch.equal(free[mask], squares[mask])
    torch.testing.assert_close(phase[:, :4].unflatten(1, (2, 2)).norm(dim=-1), torch.ones(3, 2))


def test_given_squares_affect_the_others():
    prior, noise = small_prior(), noise_of(1)
    known = torch.zeros(1, 1, SIZE, SIZE)
    known[..., 5] = 1
    with torch.no_grad():
        first, second = (prior.sample(noise, TIMES, functional.one_hot(
            torch.full((1, SIZE, SIZE), number), CLASSES).float(), known)[0] for number in (0, 1))
    assert (first - second)[0, :, 6].abs().max() > 1e-4
    assert (first - second)[0, :, 4].abs().max() > 1e-4


def test_samples_of_the_prior_are_differentiable():
    """From noise to probabilities, phase and velocity; the networks compute in float32."""
    prior, noise = small_prior(), noise_of(1)
    with torch.no_grad():
        prior.out[-1].weight.mul_(5)  # so that predictions depend on earlier ones
    generator = torch.Generator().manual_seed(5)
    weights = (torch.randn(1, SIZE, SIZE, CLASSES, generator=generator),
               torch.randn(1, NUM_GLOBALS, generator=generator))

    def total(squares, camera):
        changed = dataclasses.replace(noise, squares=squares, globals=camera)
        results = prior.sample(changed, TIMES[::4])
        return sum((result.double() * weight).sum() for result, weight in zip(results, weights))

    inputs = noise.squares.requires_grad_(), noise.globals.requires_grad_()
    gradients = torch.autograd.grad(total(*inputs), inputs)
    for i in range(2):
        direction = torch.randn(inputs[i].shape, generator=generator)
        direction = direction + 3 * gradients[i] / gradients[i].norm() * direction.std()
        expected = float((gradients[i] * direction).sum())
        assert abs(expected) > 1e-3
        assert slope(total, inputs, i, direction, 0.01) == pytest.approx(expected, rel=0.03)


MEAN, DEVIATION = 0.7, 0.4


class GaussianPrior(WorldPrior):
    """The best prediction of Gaussian phases and velocities, and of squares that are all 1."""

    def forward(self, x, known, camera, camera_known, time, strongest=0.0):
        logits = torch.zeros(len(x), SIZE, SIZE, CLASSES)
        logits[..., 1] = 30
        return logits, posterior_mean(camera, time[:, None])


def posterior_mean(x, time):
    """Return the mean of N(MEAN, DEVIATION²) given its mixture x with noise at a time."""
    gain = time * DEVIATION ** 2 / ((1 - time) ** 2 + (time * DEVIATION) ** 2)
    return MEAN + gain * (x - time * MEAN)


def test_flows_transport_noise_to_the_data():
    """The flow between two Gaussian distributions is linear in the noise."""
    noise, times = noise_of(4), torch.linspace(0, 1, 101)[:-1]
    squares, camera = GaussianPrior(SIZE, CLASSES, (8, 8, 8)).sample(noise, times)
    expected = MEAN + DEVIATION * noise.globals
    torch.testing.assert_close(camera[:, 4:], expected[:, 4:], atol=0.02, rtol=0)
    phase = functional.normalize(expected[:, :4].unflatten(1, (2, 2)), dim=-1).flatten(1)
    torch.testing.assert_close(camera[:, :4], phase, atol=0.03, rtol=0)
    assert (squares.argmax(dim=-1) == 1).all()

    prior = start_prior()
    prior.forward = lambda x, view, camera, time: posterior_mean(x, time[:, None, None, None])
    vectors = prior.sample(noise.vector, torch.zeros(4, 3, GRID, GRID), camera, times[::4])
    expected = prior.vectors(MEAN + DEVIATION * noise.vector)
    torch.testing.assert_close(vectors, expected, atol=2e-3, rtol=0)


def start_prior(channels=2, view_channels=3):
    torch.manual_seed(0)
    prior = StartPrior(channels, view_channels, 16)
    prior.mean.normal_(0, 0.1)
    prior.scale.uniform_(0.05, 0.2)
    return prior


def test_start_vectors_are_standardised_and_back():
    prior = start_prior()
    vectors = functional.normalize(torch.randn(5, 2 * GRID ** 2), dim=-1)
    codes = prior.standardise(vectors)
    assert codes.shape == (5, 2, GRID, GRID)
    torch.testing.assert_close(prior.vectors(codes), vectors)
    torch.testing.assert_close(prior.vectors(torch.randn(5, 2, GRID, GRID)).norm(dim=-1),
                               torch.ones(5))
    cells = vectors.unflatten(1, (GRID, GRID, 2))  # as in ``SpatialStart``
    value = (cells[3, 6, 1, 1] - prior.mean[1, 6, 1]) / prior.scale[1, 0, 0]
    torch.testing.assert_close(codes[3, 1, 6, 1], value)


def test_start_vectors_are_generated_in_their_world():
    prior, noise = start_prior(), noise_of(2).vector
    with torch.no_grad():
        for parameter in prior.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.05)
        view, camera = torch.randn(2, 3, GRID, GRID), torch.randn(2, NUM_GLOBALS)
        vectors = prior.sample(noise, view, camera, TIMES[::2])
        assert vectors.shape == (2, 2 * GRID ** 2)
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(2))
        assert torch.equal(vectors, prior.sample(noise, view, camera, TIMES[::2]))
        for other in ((noise + 1, view, camera), (noise, view + 1, camera), (noise, view, -camera)):
            assert not torch.allclose(vectors, prior.sample(*other, TIMES[::2]), atol=1e-4)


def striped(num, generator):
    """Return worlds in which the class of a column is that of its left neighbour plus 1."""
    first = torch.randint(CLASSES, (num, 1, 1), generator=generator)
    return ((first + torch.arange(SIZE)) % CLASSES).expand(num, SIZE, SIZE)


def obeyed(prior):
    """Return the share of neighbours in sampled worlds that obey the rule of ``striped``."""
    with torch.no_grad():
        drawn = prior.sample(noise_of(16, 9), TIMES)[0].argmax(dim=-1)
    return float(((drawn[:, :, 1:] - drawn[:, :, :-1]) % CLASSES == 1).float().mean())


@pytest.mark.slow
def test_the_prior_learns_a_pattern():
    torch.manual_seed(0)
    prior, generator = WorldPrior(SIZE, CLASSES, (16, 24, 32)), torch.Generator().manual_seed(3)
    assert obeyed(prior) < 0.5
    optimizer = torch.optim.Adam(prior.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.03, 200)
    for _ in range(200):
        camera = torch.full((16, NUM_GLOBALS), 0.5)
        loss = sum(world_loss(prior, striped(16, generator), camera, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert obeyed(prior) > 0.9
    classes = striped(16, generator)
    known = torch.zeros(16, 1, SIZE, SIZE)
    known[..., :9] = 1  # which determines the other columns
    with torch.no_grad():
        _, camera = prior.sample(noise_of(16, 9), TIMES)
        drawn, _ = prior.sample(noise_of(16, 9), TIMES,
                                functional.one_hot(classes, CLASSES).float(), known)
    assert (drawn.argmax(dim=-1) == classes)[:, :, 9:].float().mean() > 0.9
    assert (camera[:, 4:] - 0.5).abs().mean() < 0.2


class SolvedPrior(WorldPrior):
    """Predicts the class of ``striped`` worlds right where it is not given, and wrong elsewhere."""

    def forward(self, x, known, camera, camera_known, time, strongest=0.0):
        right = functional.one_hot(self.solution, CLASSES)
        logits = torch.where(known[:, 0, ..., None] > 0, right.roll(1, dims=-1), right)
        return 30.0 * logits, torch.full_like(camera, 0.5)


def test_the_prior_is_trained_where_nothing_is_given():
    prior, generator = SolvedPrior(SIZE, CLASSES, (8, 8, 8)), torch.Generator().manual_seed(0)
    prior.solution = striped(32, generator)
    camera = torch.full((32, NUM_GLOBALS), 0.5)
    for squares, expected in ((prior.solution, 0), (prior.solution.roll(1, dims=2), 30)):
        entropy, squared = world_loss(prior, squares, camera, generator)
        assert float(entropy) == pytest.approx(expected, abs=1e-3) and squared == 0


def test_masks_leave_squares_to_generate():
    known, camera = draw_masks(400, NUM_SQUARES, torch.Generator().manual_seed(0))
    assert known.shape == (400, 1, NUM_SQUARES, NUM_SQUARES) and camera.shape == (400, 1)
    assert set(known.unique().tolist()) == {0, 1}
    shares = known.mean(dim=(1, 2, 3))
    assert (shares < 1).all() and torch.equal(shares > 0, camera[:, 0] > 0)
    middle, reach = NUM_SQUARES // 2, 7
    view = known[:, :, middle - reach:middle + reach + 1, middle - reach:middle + reach + 1]
    inside, kinds = view.sum(dim=(1, 2, 3)), known.sum(dim=(1, 2, 3))
    of_view = (kinds == inside) & (kinds > 0)
    assert 0.3 < float(of_view.float().mean()) < 0.5
    assert ((inside[of_view] > 100) & (inside[of_view] < 225)).all()
    assert (known[of_view, :, middle - 1:middle + 2, middle - 1:middle + 2] == 0).flatten(1).any(
        dim=1).all()  # the player hides a square
    assert 0.2 < float((kinds == 0).float().mean()) < 0.4
    cut = 1 - known[(kinds > 600)]
    assert cut.amax(dim=(1, 2))[:, 0].sum() > 0 and cut.amax(dim=(1, 3))[:, 0].sum() > 0
    sides = [known[:, 0, 0], known[:, 0, -1], known[:, 0, :, 0], known[:, 0, :, -1]]
    for side in sides:  # strips lie at all four sides
        assert ((side.sum(dim=1) == 0) & (kinds > 600)).any()
