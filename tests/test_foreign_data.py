"""Recordings in HDF5, frames and actions of other programs, Gymnasium environments, and analyses
without Procgen."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, bytes_of_files, counting_policy, refusal

import agents.hdf5 as hdf5
import train_gen_model
from agents import RolloutFolder, import_frames, load_agent, record
from agents.agent_file import AgentOrigin, save_agent
from common.errors import UserError
from common.game_constants import GAMES
from envs.env_config import EnvConfig
from generative.runs import checkpoints


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Agent file, and a recording of 3 short episodes without action noise."""
    folder = tmp_path_factory.mktemp("played")
    save_agent(folder / "model.pth", counting_policy(), origin=AgentOrigin(
        env_name="coinrun", distribution_mode="easy", use_backgrounds=False, reward_scale=1.0))
    levels = EnvConfig("fruitbot", "easy", start_level=20, num_levels=9)
    return folder / "model.pth", record(folder / "model.pth", levels, folder / "data",
                                        num_episodes=3)


def files_in(folder):
    """Return the contents of the files of a recording, without videos and the lock."""
    return {name: content for name, content in bytes_of_files(folder).items()
            if not name.startswith(".") and not name.endswith(".mp4")}


def test_hdf5_round_trip_is_exact(played, hard_recording, tmp_path, capsys):
    """Fails if a column, a dtype, a world or the settings are lost."""
    h5py = pytest.importorskip("h5py")
    for name, recording in (("plain", played[1]), ("worlds", hard_recording)):
        file, copy = tmp_path / f"{name}.h5", tmp_path / name
        assert hdf5.main([str(recording.path), "--output", str(file)]) == 0
        assert hdf5.main([str(file), "--output", str(copy)]) == 0
        original, restored = files_in(recording.path), files_in(copy)
        assert original.keys() == restored.keys() and original == restored
        assert RolloutFolder(copy).sha256() == recording.sha256()
    with h5py.File(tmp_path / "plain.h5") as opened:
        frames = played[1].episode(0).frames
        assert np.array_equal(opened["episode_00000/frames"], frames)
    assert "--overwrite replaces it" in refusal(
        hdf5.main, [played[1].path, "--output", tmp_path / "plain.h5"], capsys)
    (tmp_path / "text.h5").write_text("no")
    assert "cannot be read as a recording" in refusal(
        hdf5.main, [tmp_path / "text.h5", "--output", tmp_path / "none"], capsys)


def foreign_arrays(episode):
    """Return an episode of a recording in the convention of Gymnasium."""
    steps = episode.steps
    ends = np.zeros(len(steps) - 1, bool)
    ends[-1] = True
    return {"obs": episode.frames[:-1], "actions": steps["action"].to_numpy()[:-1],
            "rewards": steps["reward"].to_numpy(np.float32)[1:], "terminated": ends,
            "seeds": steps["level_seed"].to_numpy()[:-1]}


def train_on(data, agent, root):
    assert train_gen_model.main([
        "--agent_file", str(agent), "--data_dir", str(data), "--log_dir_base", str(root),
        "--interpreting_params_name", "tiny", "--gen_mod_exp_name", "t", "--max_batches", "2",
        "--save_interval", "2", "--precision", "float32", "--device", "cpu"]) == 0
    [run] = (root / "results" / "t").iterdir()
    return torch.load(checkpoints(run)[-1], weights_only=True)["gen_model_state_dict"]


@pytest.mark.parametrize("form", ["folder", "npz", "h5"])
def test_imported_frames_are_the_recording(form, played, tmp_path):
    """Fails if rewards, ends or actions are shifted, or the agent watches other frames."""
    agent, recording = played
    episodes = [foreign_arrays(recording.episode(number)) for number in range(3)]
    source = tmp_path / "source.npz"
    if form == "npz":
        np.savez(source, **{name: np.concatenate([episode[name] for episode in episodes])
                            for name in episodes[0]})
    elif form == "folder":
        source = tmp_path / "source"
        source.mkdir()
        for number, episode in enumerate(episodes):
            np.savez(source / f"{number}.npz", **episode)
    else:
        h5py = pytest.importorskip("h5py")
        source = tmp_path / "source.h5"
        with h5py.File(source, "w") as file:
            for number, episode in enumerate(episodes):
                for name, array in episode.items():
                    file[f"episode_{number}/{name}"] = array
    output = tmp_path / "data"
    assert import_frames.main([str(source), "--agent_file", str(agent), "--output", str(output),
                               "--env_name", "fruitbot", "--distribution_mode", "easy",
                               "--no_backgrounds", "--precision", "float32"]) == 0
    original, imported = files_in(recording.path), files_in(output)
    assert {name for name in original if original[name] != imported[name]} <= {"recording.json"}
    assert RolloutFolder(output).sha256() == recording.sha256()
    if form == "folder":
        weights = [train_on(data, agent, tmp_path / name) for name, data in (
            ("original", recording.path), ("imported", output))]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(("arrays", "words"), [
    ({"frames": np.zeros((3, 64, 64, 3), np.uint8)}, "has no array actions (nor action)"),
    ({"frames": np.zeros((3, 84, 84, 3), np.uint8), "actions": np.zeros(3, int)}, "the shape"),
    ({"frames": np.zeros((5, 64, 64, 3), np.uint8), "actions": np.zeros(3, int)},
     "there are 3 actions, but 5 frames"),
    ({"frames": np.zeros((3, 64, 64, 3), np.uint8), "actions": np.full(3, 15)}, "from 0 to 14")])
def test_unusable_frames_are_named(arrays, words, tmp_path):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(UserError, match=words.replace("(", r"\(").replace(")", r"\)")):
        list(import_frames.read_episodes(tmp_path / "data.npz"))


def test_frames_without_ends_are_one_unfinished_episode(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=frames.transpose(0, 3, 1, 2), action=[1, 2, 3])
    [episode] = import_frames.read_episodes(tmp_path / "data.npz")
    assert not episode.ended and np.array_equal(episode.frames, frames)
    assert episode.actions.tolist() == [1, 2, 3] and episode.seed == -1


def test_procgen_environments_follow_gymnasium():
    """Fails if a level depends on earlier ones, or a state does not restore the game."""
    gymnasium = pytest.importorskip("gymnasium")
    from gymnasium.utils.env_checker import check_env

    import envs.gymnasium_env  # noqa: F401  registers the games
    env = gymnasium.make("procgen/coinrun-v0", distribution_mode="hard", num_levels=5,
                         render_mode="rgb_array").unwrapped
    check_env(env)
    first, info = env.reset(seed=1, options={"level": 3})
    assert info == {"level_seed": 3} and env.render().shape == (512, 512, 3)
    assert env.reset(seed=1)[1]["level_seed"] in range(5)
    plain = env.reset(options={"level": 3})[0]
    assert np.array_equal(plain, first)
    state = env.get_state()
    after = [env.step(7)[0] for _ in range(5)]
    assert np.array_equal(env.set_state(state), plain)
    assert all(np.array_equal(env.step(7)[0], frame) for frame in after)
    for game, option, differs in (("coinrun", {"restrict_themes": True}, True),
                                  ("maze", {"use_monochrome_assets": True}, True),
                                  ("caveflyer", {"center_agent": False}, True),
                                  ("coinrun", {"use_sequential_levels": True}, False)):
        frames = [gymnasium.make(f"procgen/{game}-v0", **options).reset(options={"level": 3})[0]
                  for options in ({}, option)]
        assert np.array_equal(*frames) != differs
    env.close()
    vector = gymnasium.make_vec("procgen/maze-v0", num_envs=2)
    frames, _ = vector.reset(seed=4)
    states = vector.get_state()
    seen = vector.step(np.array([7, 1]))
    assert seen[0].shape == (2, 64, 64, 3) and seen[1].shape == seen[2].shape == (2,)
    assert np.array_equal(vector.set_state(states), frames)
    assert np.array_equal(vector.reset(seed=4)[0], frames)
    vector.close()
    assert len(GAMES) == sum(name.startswith("procgen/") and "Dream" not in name
                             for name in gymnasium.registry)


def test_sequential_levels_continue_the_episode():
    """Fails if the option does not reach the game."""
    pytest.importorskip("gymnasium")
    from envs.gymnasium_env import ProcgenEnv
    steps = {}
    for sequential in (False, True):
        env = ProcgenEnv("bossfight", "easy", use_sequential_levels=sequential)
        assert vars(env.config).get("use_sequential_levels", False) == sequential
        assert env._slots._config.use_sequential_levels == sequential
        env.reset(options={"level": 1})
        steps[sequential] = env.get_state()
        env.close()
    assert steps[False] != steps[True]


def test_dreams_are_environments(simulator, played, tmp_path):
    """Fails if a dream depends on anything but its start, world and actions, or if the vector
    version gives other episodes."""
    gymnasium = pytest.importorskip("gymnasium")
    from gymnasium.utils.env_checker import check_env

    from generative.dream_env import DreamEnv, DreamVectorEnv
    env = DreamEnv(simulator=simulator, max_steps=4, render_mode="rgb_array")
    check_env(env, skip_render_check=True)
    frame, info = env.reset(seed=0)
    assert np.array_equal(env.reset(options=info)[0], frame)
    state = env.get_state()
    dreams = []
    for _ in range(2):
        assert np.array_equal(env.set_state(state), frame)
        dreams.append([env.step(action)[0] for action in (7, 1, 5)])
    assert np.array_equal(*dreams)
    env.set_state(state)
    assert [env.step(7)[3] for _ in range(4)] in ([False] * 3 + [True], [False] * 4)
    started = DreamEnv(simulator=simulator, data_dir=played[1].path)
    _, info = started.reset(seed=1)
    recorded = played[1].episode(info["episode"])
    assert 2 <= info["row"] < len(recorded.frames)
    with pytest.raises(UserError, match="row must lie between"):
        started.reset(options={"episode": 0, "row": 0})
    vector = DreamVectorEnv(2, simulator=simulator, max_steps=2)
    frames, _ = vector.reset(seed=0)
    second = DreamEnv(simulator=simulator, max_steps=2)
    assert np.array_equal(second.reset(seed=1)[0], frames[1])
    one = second.step(3)
    both = vector.step(np.array([7, 3]))
    np.testing.assert_allclose(both[0][1].astype(int), one[0].astype(int), atol=1)
    finals = vector.step(np.array([7, 3]))[4]
    assert finals["_final_obs"].all() and finals["final_obs"].shape == frames.shape
    assert gymnasium.spec("procgen/Dream-v0").vector_entry_point.endswith(":DreamVectorEnv")


def test_stable_baselines_trains_in_game_and_dream(simulator, tmp_path):
    """Fails if an environment is not accepted, or the trained agent does not open."""
    sb3 = pytest.importorskip("stable_baselines3")
    from envs.gymnasium_env import ProcgenEnv
    from generative.dream_env import DreamEnv
    for name, env in (("game", ProcgenEnv("fruitbot")),
                      ("dream", DreamEnv(simulator=simulator, max_steps=8))):
        model = sb3.PPO("CnnPolicy", env, n_steps=16, batch_size=16, n_epochs=1, device="cpu")
        before = model.policy.action_net.weight.detach().clone()
        model.learn(32)
        model.save(tmp_path / f"{name}.zip")
        policy = load_agent(tmp_path / f"{name}.zip")
        assert torch.equal(policy.fc_policy.weight, model.policy.action_net.weight)
        assert not torch.equal(policy.fc_policy.weight, before)


WITHOUT_PROCGEN = """
import importlib, sys, pathlib
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("procgen", "gym", "gym3"):
            raise ImportError(f"no module named {name}")
sys.meta_path.insert(0, Blocked())
for name in sys.argv[4:]:
    importlib.import_module(name)
import train_gen_model
from attribution import attribute_to_layer
from agents import RolloutFolder, load_agent, record
from common.errors import UserError
from envs.env_config import EnvConfig
agent, data, root = sys.argv[1:4]
frames = RolloutFolder(data).episode(0).frames[:2]
assert attribute_to_layer(load_agent(agent), frames, "embedder.relu3", outputs=["value"])
assert train_gen_model.main(["--agent_file", agent, "--data_dir", data, "--log_dir_base", root,
    "--interpreting_params_name", "tiny", "--gen_mod_exp_name", "t", "--max_batches", "1",
    "--precision", "float32", "--device", "cpu"]) == 0
try:
    record(agent, EnvConfig("maze", "easy"), root + "/new", num_episodes=1)
except UserError as error:
    assert "this needs Procgen" in str(error), error
else:
    raise AssertionError("recorded without Procgen")
"""


@pytest.mark.slow
def test_everything_after_recording_runs_without_procgen(played, tmp_path):
    """Fails if a module other than envs.procgen_binding imports Procgen, or training needs it."""
    packages = ("common", "stats", "envs", "agents", "interventions", "generative", "analysis",
                "maze", "attribution", "pipeline")
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
               for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    scripts = [path.stem for path in sorted(ROOT.glob("*.py"))
               if not path.is_symlink() and path.stem != "setup"]
    needing = {"envs.procgen_binding"} | (
        set() if _installed("gymnasium")
        else {"envs.gymnasium_env", "generative.dream_env"})
    names = [name for name in (*modules, *scripts) if name not in needing]
    agent, recording = played
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PROCGEN, str(agent), str(recording.path), str(tmp_path),
         *names], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def _installed(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True
