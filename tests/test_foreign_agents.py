"""Agents of other programs: their files, and modules as agents."""

import dataclasses
import json
import zipfile

import numpy as np
import pytest
import torch
from conftest import FLOAT32, random_frames, refusal
from foreign_networks import CleanAgent, CleanLstmAgent, seeded
from procgen.env import ENV_NAMES, EXPLORATION_LEVEL_SEEDS
from torch import nn

import evaluate
from agents import Condition, Testbed, cached, import_policy, load_agent, patched, wrap
from agents.agent_file import read_origin
from agents.episodes import PlayOptions
from agents.layers import find_layer
from attribution import attribute_to_layer
from common.errors import UserError
from common.game_constants import GAMES
from envs.env_config import GAMES_OF_MODE, EnvConfig

FRAMES = random_frames(4)
KEPT = torch.tensor([1.0, 0, 1, 1])  # the second frame begins an episode


def assert_equal_outputs(output, logits, values):
    torch.testing.assert_close(output.logits.detach(), logits.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.values.detach(), values.detach().reshape(-1), rtol=0,
                               atol=1e-5)


def test_games_are_procgens():
    assert tuple(ENV_NAMES) == GAMES
    for game, level in EXPLORATION_LEVEL_SEEDS.items():
        assert list(EnvConfig(game, "exploration").levels) == [level]
    assert GAMES_OF_MODE["exploration"] == tuple(EXPLORATION_LEVEL_SEEDS)


@pytest.mark.parametrize("layout", [
    lambda state: state,
    lambda state: {"model": state, "optimizer": {"state": {}, "param_groups": []}, "step": 3},
    lambda state: {"state_dict": state},
    lambda state: {f"module.agent.{name}": tensor for name, tensor in state.items()},
    lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
    lambda state: {name.replace("network.", "network._orig_mod."): tensor
                   for name, tensor in state.items()},
    lambda state: {name: tensor.double() for name, tensor in state.items()},
    lambda state: {**state, "aux_critic.weight": torch.zeros(1, 256)}])
def test_cleanrl_files_open_in_all_layouts(layout, tmp_path):
    """Fails if a prefix, an entry or a layer is mistaken for another."""
    agent, path = seeded(CleanAgent()), tmp_path / "starpilot__ppo_procgen.cleanrl_model"
    torch.save(layout(agent.state_dict()), path)
    assert_equal_outputs(load_agent(path)(FRAMES), *agent(torch.from_numpy(FRAMES).float()))


def test_cleanrl_lstm_has_a_memory_that_patches_reach(tmp_path):
    """Fails if gates, or output and cell, are mixed up, or a reset keeps the cell."""
    agent, path = seeded(CleanLstmAgent(), 0.1), tmp_path / "agent.pth"
    torch.save(agent.state_dict(), path)
    policy = load_agent(path)
    hidden = torch.randn(4, 40).tanh()
    with cached(policy, ["hidden_state", "lstm"]) as cache:
        output = policy(FRAMES, hidden, KEPT)
    images = torch.from_numpy(FRAMES).permute(0, 3, 1, 2) / 255
    logits, values, states = agent(images, hidden * KEPT[:, None])
    assert_equal_outputs(output, logits, values)
    torch.testing.assert_close(cache["lstm"], states.detach(), rtol=0, atol=1e-6)
    with patched(policy, {"hidden_state": lambda state: torch.zeros_like(state)}):
        assert torch.equal(policy(FRAMES, hidden).logits[0], policy.fc_policy.bias)
    steps = policy.embed(images)[:, None]  # the same frame sequence, with a reset in the middle
    whole = policy.sequence(steps, hidden[:1], KEPT[:, None]).hidden_states
    state = hidden[:1]
    for step, keep in zip(steps, KEPT):
        state = policy.step(step, keep * state).hidden_states
    torch.testing.assert_close(whole[-1], state)
    assert policy.to_state(torch.full((40,), 9.0))[[0, 39]].round().tolist() == [1, 9]
    env = EnvConfig("fruitbot", "easy")
    plain, reset = Testbed(policy, FLOAT32, env, [1, 2], num_slots=2,
                           options=PlayOptions(max_steps=9)).play([
        Condition("plain"), Condition("reset", alter_state=lambda states, info: 0 * states)])
    assert [episode.length > 0 for episode in (*plain.episodes, *reset.episodes)] == 4 * [True]


def stable_baselines_env():
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("sb3_contrib")

    class Frames(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        action_space = gymnasium.spaces.Discrete(15)
    return Frames()


def test_stable_baselines_archives_open(tmp_path):
    """Fails if a tensor goes to another layer, or facts of the training are not read."""
    env = stable_baselines_env()
    from stable_baselines3 import PPO
    model = PPO("CnnPolicy", env, n_steps=8, batch_size=8, gamma=0.97, device="cpu")
    seeded(model.policy, 0.1)
    model.save(tmp_path / "ppo.zip")
    observation = model.policy.obs_to_tensor(FRAMES.transpose(0, 3, 1, 2))[0]
    output = load_agent(tmp_path / "ppo.zip")(FRAMES)
    logits = model.policy.get_distribution(observation).distribution.logits
    torch.testing.assert_close(output.log_probs, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.values, model.policy.predict_values(observation)[:, 0],
                               rtol=0, atol=1e-5)
    assert read_origin(tmp_path / "ppo.zip").gamma == 0.97
    model = PPO("CnnPolicy", env, n_steps=8, batch_size=8, policy_kwargs={"net_arch": [8]})
    model.save(tmp_path / "deep.zip")
    with pytest.raises(UserError, match="heads have hidden layers"):
        load_agent(tmp_path / "deep.zip")


@pytest.mark.parametrize("kwargs", [{}, {"shared_lstm": True, "enable_critic_lstm": False}])
def test_recurrent_ppo_has_an_lstm_per_head(kwargs, tmp_path):
    """Fails if the value reads the LSTM of the policy, or a state is at another place."""
    env = stable_baselines_env()
    from sb3_contrib import RecurrentPPO
    model = RecurrentPPO("CnnLstmPolicy", env, n_steps=8, batch_size=8, device="cpu",
                         policy_kwargs={"lstm_hidden_size": 12, **kwargs})
    seeded(model.policy, 0.1)
    model.save(tmp_path / "recurrent.zip")
    actor, critic = ((torch.randn(1, 4, 12).tanh(), torch.randn(1, 4, 12)) for _ in range(2))
    if kwargs:
        parts = actor
        critic = actor
    else:
        parts = actor[0], critic[0], actor[1], critic[1]
    output = load_agent(tmp_path / "recurrent.zip")(FRAMES, torch.cat(parts, -1)[0], KEPT)
    observation = model.policy.obs_to_tensor(FRAMES.transpose(0, 3, 1, 2))[0]
    logits = model.policy.get_distribution(observation, actor, 1 - KEPT)[0].distribution.logits
    values = model.policy.predict_values(observation, critic, 1 - KEPT)[:, 0]
    torch.testing.assert_close(output.log_probs, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.values, values, rtol=0, atol=1e-5)


def test_import_writes_an_agent_file_that_states_its_training(tmp_path, capsys):
    """Fails if the file loses a fact, an unnamed game is not asked for, or actions are mixed up."""
    agent, path = seeded(CleanAgent(actions=3)), tmp_path / "agent.pth"
    torch.save({"agent": agent.state_dict(), "args": {"gamma": 0.98}}, path)
    argv = [path, "--output", tmp_path / "model.pth"]
    assert "a head of 3 actions acts in a reduced action set" in refusal(
        import_policy.main, argv, capsys)
    argv += ["--actions", 7, 4, 1]
    assert "give --env_name" in refusal(import_policy.main, argv, capsys)
    assert import_policy.main([str(word) for word in [
        *argv, "--env_name", "bigfish", "--reward_scale", "0.5"]]) == 0
    assert "easy, backgrounds (mode and backgrounds as is usual with CleanRL)" in (
        capsys.readouterr().err)
    origin = read_origin(tmp_path / "model.pth")
    assert {name: value for name, value in dataclasses.asdict(origin).items()
            if value is not None} == {
        "reward_scale": 0.5, "use_backgrounds": True, "gamma": 0.98, "env_name": "bigfish",
        "distribution_mode": "easy"}
    output = load_agent(tmp_path / "model.pth")(FRAMES)
    logits, values = agent(torch.from_numpy(FRAMES).float())
    assert_equal_outputs(dataclasses.replace(output, logits=output.logits[:, [7, 4, 1]]),
                         logits, values)
    assert output.log_probs.exp()[:, [7, 4, 1]].sum(dim=-1).allclose(torch.ones(4))


def test_evaluation_says_that_a_useless_agent_may_be_of_another_game(tmp_path, capsys):
    path = tmp_path / "agent.pth"
    torch.save(seeded(CleanAgent(), 0.001).state_dict(), path)
    argv = ["--agent_file", str(path), "--num_episodes", "2", "--device", "cpu"]
    assert evaluate.main([*argv, "--env_name", "fruitbot"]) == 0
    assert "random agent" not in capsys.readouterr().out
    evaluate.warn_of_wrong_game(
        evaluate.EvaluateOptions(agent_file=path, num_episodes=2), FLOAT32,
        EnvConfig("fruitbot", "easy"), [1, 2], None, {"return_interval": (-9, 9)})
    assert "fruitbot looks like the wrong game" in capsys.readouterr().out


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 8, 4), nn.ReLU(inplace=True)
        self.gru, self.pi, self.v = nn.GRUCell(900, 10), nn.Linear(10, 15), nn.Linear(10, 1)

    def forward(self, frames, state, masks):
        state = self.gru(self.act(self.conv(frames)).flatten(1), state * masks[:, None])
        return self.pi(state), self.v(state)[:, 0], state


class Functional(nn.Module):
    """Its value is no output of a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 8, 4), nn.Linear(900, 16)

    def forward(self, frames):
        outputs = self.linear(torch.relu(self.conv(frames)).flatten(1)).tanh()
        return outputs[:, :15], outputs[:, 15]


def test_wrapped_modules_work_as_agents():
    """Fails if a head or a state is found in the wrong place, or a cached or patched layer is not
    the module's."""
    agent = seeded(CleanAgent())
    policy = wrap(agent, channels_last=True, scale=255)
    assert policy.hidden_state_size == 256 and not policy.recurrent
    output = policy(FRAMES)
    assert_equal_outputs(output, *agent(torch.from_numpy(FRAMES).float()))
    assert find_layer(policy, "embedder.module.network.1").shape == (32, 16, 16)
    with cached(policy, ["embedder.module.network.2.res_block1"]) as cache, patched(
            policy, {"embedder.module.network.0": lambda block: 0 * block}):
        changed = policy(FRAMES)
    [block] = cache.values()
    assert block.shape == (4, 32, 8, 8) and not torch.equal(changed.logits, output.logits)
    result = attribute_to_layer(policy, FRAMES[:2], "embedder.module.network.2", outputs=["value"])
    np.testing.assert_allclose(result.values.sum(axis=(2, 3, 4)),
                               result.outputs - result.baselines, atol=0.02)

    module, images = seeded(Recurrent(), 0.2), torch.from_numpy(FRAMES).permute(0, 3, 1, 2) / 255
    policy, hidden = wrap(module, state_size=10), torch.randn(4, 10).tanh()
    logits, values, states = module(images, hidden, KEPT)
    output = policy(FRAMES, hidden, KEPT)
    assert_equal_outputs(output, logits, values)
    torch.testing.assert_close(output.hidden_states, states)
    result = attribute_to_layer(policy, FRAMES[:1], "core.module.act", outputs=["value"],
                                hidden_states=hidden[:1])
    np.testing.assert_allclose(result.values.sum(axis=(2, 3, 4)),
                               result.outputs - result.baselines, atol=1e-3)
    [played] = Testbed(policy, FLOAT32, EnvConfig("fruitbot", "easy"), [1], num_slots=1,
                        options=PlayOptions(max_steps=9)).play(
        [Condition("no memory", patches=[])])
    assert played.episodes[0].length > 0

    module = seeded(Functional())
    policy = wrap(module)
    assert_equal_outputs(policy(FRAMES), *module(images))
    assert policy.hidden_state_size == 16
    with pytest.raises(UserError, match=r"must return logits .* not tensors of the shapes"):
        wrap(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(0, 1)))


def test_python_files_define_agents(tmp_path, capsys):
    """Fails if facts about the training are not read, or a broken file gives a traceback."""
    path = tmp_path / "my_agent.py"
    path.write_text("import torch\nfrom torch import nn\n"
                    "class Net(nn.Module):\n"
                    "    def __init__(self):\n"
                    "        super().__init__()\n"
                    "        self.linear = nn.Linear(48, 16)\n"
                    "    def forward(self, frames):\n"
                    "        out = self.linear(frames[:, :, ::16, ::16].flatten(1))\n"
                    "        return out[:, :15], out[:, 15]\n"
                    "agent, env_name, gamma = Net(), 'fruitbot', 0.9\n")
    origin = read_origin(path)
    assert (origin.env_name, origin.gamma) == ("fruitbot", 0.9)
    assert evaluate.main(["--agent_file", str(path), "--num_episodes", "2"]) == 0
    assert "on easy fruitbot" in capsys.readouterr().out
    path.write_text("1 / 0")
    assert "failed: ZeroDivisionError" in refusal(evaluate.main, ["--agent_file", path], capsys)


def save_archive(path, files):
    with zipfile.ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)


NATURE = {"network.0.weight": torch.zeros(32, 4, 8, 8), "network.0.bias": torch.zeros(32),
          "network.7.weight": torch.zeros(512, 3136), "network.7.bias": torch.zeros(512)}


@pytest.mark.parametrize(("content", "words"), [
    (NATURE, "it reads 4 stacked grey frames"),
    ({"q_net.q_net.0.weight": torch.zeros(3, 3), **dict.fromkeys("abc", torch.zeros(2))},
     "a Q-network, which has no policy"),
    ({"base.fc.weight": torch.zeros(2), "base.fc.bias": torch.zeros(2),
      "dist.linear.weight": torch.zeros(2), "dist.linear.bias": torch.zeros(2)},
     "pytorch-a2c-ppo-acktr family"),
    ({"optim": (adam := torch.optim.Adam(CleanAgent().parameters())).state_dict(), "step": 3},
     "holds the state of an optimiser, but no agent"),
    (adam.state_dict(), "holds the state of an optimiser, but no agent"),
    ({"a": CleanAgent().state_dict(), "b": CleanAgent().state_dict()},
     "holds several agents, 'a' and 'b'"),
    ({**CleanAgent().state_dict(), "attention.weight": torch.zeros(2)},
     "it has a tensor 'attention.weight', which CleanRL's networks do not have"),
    (b"\x82\xa6params\x81\xa6kernel", "a JAX file (Flax's msgpack)"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes"),
    ((24).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}   ', "a safetensors file"),
    (b"\x80\x04\x95\x10", "a Python pickle, which would run code"),
    ({"arr_0.npy": b""}, "a NumPy archive (.npz)"),
    ({"data": json.dumps({}), "readme.txt": b""}, "neither torch nor Stable-Baselines3 wrote"),
    (b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS"),
    (b"", "empty"),
    (b"PK\x03\x04 and a part", "truncated: the end of its archive is missing"),
    (b'model_checkpoint_path: "model.ckpt-100"', "a part of a TensorFlow checkpoint"),
    (bytes(40) + (0xdb4775248b80fb57).to_bytes(8, "little"), "a part of a TensorFlow checkpoint"),
    ({"quantile_net.quantile_net.0.weight": torch.zeros(3, 3),
      **dict.fromkeys("abc", torch.zeros(2))}, "a Q-network, which has no policy")])
def test_other_files_are_refused_by_what_they_are(content, words, tmp_path, capsys):
    path = tmp_path / "agent"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif all(isinstance(value, bytes | str) for value in content.values()):
        save_archive(path, content)
    else:
        torch.save(content, path)
    assert words in refusal(evaluate.main, ["--agent_file", path], capsys)


def test_folders_and_raw_numbers_are_refused_by_their_names(tmp_path, capsys):
    """Fails if a checkpoint of RLlib is called a folder only, or TensorFlow's numbers truncated."""
    (tmp_path / "rllib_checkpoint.json").write_text("{}")
    assert "an RLlib checkpoint" in refusal(evaluate.main, ["--agent_file", tmp_path], capsys)
    path = tmp_path / "model.ckpt.data-00000-of-00001"
    path.write_bytes(bytes(range(1, 200)))
    assert "TensorFlow checkpoint" in refusal(evaluate.main, ["--agent_file", path], capsys)
