"""The networks, their files, max-pooling in bfloat16, and step-wise and sequence passes."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FLOAT32, FULL, GOLDEN, ROOT, assert_same, tiny_policy
from torch.nn import functional

from agents import networks
from agents.acting import draw_actions, run_policy
from agents.agent_file import load_agent, save_agent
from agents.layers import find_layer
from agents.pooling import ParallelMaxPool, can_pool
from agents.ppo import Collector, Rollout, evaluate_rollout
from common.devices import Compute
from common.errors import UserError
from envs.procgen_env import EnvConfig


@pytest.fixture(scope="module")
def golden():
    return {name: torch.from_numpy(array)
            for name, array in np.load(GOLDEN / "agent_policy.npz", allow_pickle=False).items()}


@torch.no_grad()
def test_published_file_gives_the_golden_numbers(golden, published_agent):
    """The agent runs step by step, and in a single call."""
    policy, hidden = load_agent(published_agent), golden["hx0"]
    for t in range(len(golden["obs"])):
        output = policy(golden["obs"][t].float() / 255, hidden, golden["masks"][t])
        hidden = output.hidden_states
        torch.testing.assert_close(output.log_probs, golden["log_probs"][t], atol=1e-4, rtol=0)
        torch.testing.assert_close(output.values, golden["values"][t], atol=1e-4, rtol=0)
        torch.testing.assert_close(hidden, golden["hx"][t], atol=1e-4, rtol=0)
    embeddings = policy.embed(golden["obs"].flatten(0, 1).float() / 255).unflatten(0, (6, 4))
    output = policy.sequence(embeddings, golden["hx0"], golden["masks"])
    torch.testing.assert_close(embeddings, golden["embedding"], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.log_probs, golden["log_probs"], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.values, golden["values"], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.hidden_states, golden["hx"], atol=1e-4, rtol=0)


def test_saved_file_has_the_published_names_and_shapes(tmp_path):
    path = tmp_path / "model_1.pth"
    save_agent(path, tiny_policy(channels=FULL), {})
    content = torch.load(path, weights_only=True)
    layout = json.loads((GOLDEN / "checkpoint_layout.json").read_text())["agent"]
    assert {key: list(value.shape) for key, value in content["model_state_dict"].items()} == layout
    assert "optimizer_state_dict" in content


@pytest.mark.parametrize("architecture", networks.ARCHITECTURES)
@pytest.mark.parametrize(("recurrent", "learned"), [(True, True), (True, False), (False, False)])
def test_saved_agent_loads_as_the_same_agent(architecture, recurrent, learned, tmp_path):
    policy = networks.build_policy(architecture, 64, recurrent, learned)
    save_agent(tmp_path / "model_1.pth", policy, {})
    loaded = load_agent(tmp_path / "model_1.pth")
    assert (loaded.recurrent, loaded.learned_initial_state) == (recurrent, learned)
    images = torch.rand(3, 3, 64, 64)
    hidden = policy.initial_states(3)
    expected = policy(images, hidden, torch.ones(3))
    output = loaded(images, hidden, torch.ones(3))
    assert torch.equal(output.log_probs, expected.log_probs)
    assert torch.equal(output.values, expected.values)


def test_a_wide_policy_has_the_size_of_the_published_maze_agents(tmp_path):
    wide = networks.build_policy("impala", 64, False, True, width=4)
    assert sum(parameter.numel() for parameter in wide.parameters()) == 3_653_136
    save_agent(tmp_path / "model_1.pth", wide, {})
    assert_same(dict(load_agent(tmp_path / "model_1.pth").state_dict()), dict(wide.state_dict()))


def test_a_clear_policy_has_the_size_and_the_grids_of_the_published_one():
    policy = networks.build_policy("clear", 64, False, True)
    assert sum(parameter.numel() for parameter in policy.parameters()) == 363_216
    assert [(name, layer.shape) for name in ("1a", "2a", "2b", "3a", "4a")
            for layer in [find_layer(policy, f"embedder.relu{name}")]] == [
        ("1a", (16, 64, 64)), ("2a", (32, 32, 32)), ("2b", (32, 32, 32)), ("3a", (32, 16, 16)),
        ("4a", (32, 8, 8))]
    remembering = networks.build_policy("clear", 24, True, True)
    assert (remembering.gru.gru.input_size, remembering.hidden_state_size) == (512, 24)


def test_the_clear_pool_is_the_root_of_the_mean_of_squares_over_four_cells():
    x = torch.randn(2, 3, 6, 8)
    squares = x.reshape(2, 3, 3, 2, 4, 2) ** 2
    torch.testing.assert_close(networks.L2Pool()(x), (squares.mean(dim=(3, 5)) + 1e-8).sqrt())
    x = torch.zeros(1, 1, 2, 2, requires_grad=True)  # where the square root has no derivative
    networks.L2Pool()(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(1, 1, 2, 2))


@pytest.mark.parametrize(("frames", "states", "masks", "words"), [
    (torch.full((2, 3, 64, 64), 255.0), 2, 2, "float frames must lie between 0 and 1"),
    (torch.ones(2, 3, 64, 64, dtype=torch.int64), 2, 2, "not int64"),
    (torch.ones(2, 3, 64, 64), 1, 2, r"shape \(2, 64\) and masks of the shape \(2,\), not \(1, 64"),
    (torch.ones(2, 3, 64, 64), 2, 1, r"not \(2, 64\) and \(1,\)")])
def test_inputs_that_would_be_misread_are_refused(frames, states, masks, words):
    with pytest.raises(UserError, match=words):
        tiny_policy()(frames, torch.zeros(states, 64), torch.ones(masks))


@pytest.mark.parametrize(("architecture", "width"), [("impala", 256), ("nature", 512),
                                                     ("clear", 512)])
@torch.no_grad()
def test_the_state_of_a_feed_forward_agent_is_what_its_heads_read(architecture, width):
    policy = networks.build_policy(architecture, 64, recurrent=False, learned_initial_state=True)
    embeddings = policy.embed(torch.rand(6, 3, 64, 64)).unflatten(0, (3, 2))
    entering = policy.initial_states(2)
    assert torch.equal(entering, torch.zeros(2, width))
    output = policy.sequence(embeddings, entering, torch.ones(3, 2))
    assert torch.equal(output.hidden_states, embeddings)
    assert torch.equal(output.logits, policy.fc_policy(output.hidden_states))
    assert torch.equal(output.values, policy.fc_value(output.hidden_states).squeeze(-1))
    for t, embedding in enumerate(embeddings):  # the entering state is ignored
        step = policy.step(embedding, torch.randn(2, width))
        assert torch.equal(step.hidden_states, output.hidden_states[t])
        torch.testing.assert_close(step.logits, output.logits[t])


def test_initialisation_is_the_specified_one():
    torch.manual_seed(0)
    policy = networks.build_policy("impala", 64, True, True)
    heads = policy.fc_policy.weight, policy.fc_value.weight
    for weight, gain in zip(heads, (0.01, 1.0)):
        expected = gain**2 * torch.eye(len(weight))
        torch.testing.assert_close(weight @ weight.T, expected, atol=1e-6, rtol=0)
    conv = policy.embedder.block2.conv
    bound = (6 / (9 * (16 + 32))) ** 0.5  # Xavier-uniform
    assert 0.95 * bound < conv.weight.abs().max() <= bound
    assert not any(parameter.any() for name, parameter in policy.embedder.named_parameters()
                   if name.endswith("bias"))
    assert 0.06 < policy.init_hx.std() < 0.14
    nature = networks.NatureEmbedder().fc.weight  # orthogonal with the gain of relu, sqrt(2)
    torch.testing.assert_close(nature @ nature.T, 2 * torch.eye(512), atol=1e-4, rtol=0)
    clear = networks.ClearEmbedder()
    for weight, fans in ((clear.conv2b.weight, 25 * (32 + 32)), (clear.fc.weight, 256 + 512)):
        bound = (6 / fans) ** 0.5
        assert 0.95 * bound < weight.abs().max() <= bound
    assert not any(parameter.any() for name, parameter in clear.named_parameters()
                   if name.endswith("bias"))


def play_rollout(learned):
    """Return a policy and a rollout that contains several ends of episodes."""
    policy = tiny_policy()
    policy.learned_initial_state = learned
    worker = Collector(EnvConfig("fruitbot", "easy"), policy, FLOAT32, 8, 5, 2)
    worker.play(40)
    rollout = Rollout(48, 8, (64, 64, 3), 64, FLOAT32.device)
    worker.play(48, rollout)
    assert (rollout.masks[1:] == 0).sum() >= 3
    return policy, rollout


@pytest.fixture(scope="module")
def played():
    return play_rollout(True)


@pytest.mark.parametrize("learned", [True, False])
def test_training_pass_reproduces_the_rollout_across_episode_ends(learned, played):
    policy, rollout = played if learned else play_rollout(False)
    output = evaluate_rollout(policy, rollout, torch.arange(8), FLOAT32)
    taken = output.log_probs.gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(taken, rollout.log_probs, atol=1e-4, rtol=0)
    torch.testing.assert_close(output.values, rollout.values[:-1], atol=1e-4, rtol=0)
    gradients = torch.autograd.grad((output.values**2).mean(), [policy.init_hx], allow_unused=True)
    assert (gradients[0] is not None and bool(gradients[0].any())) == learned
    # A reset one step early, as in the published code, is far outside that tolerance.
    early = copy.copy(rollout)
    early.masks = torch.cat([rollout.masks[1:], torch.ones_like(rollout.masks[:1])])
    with torch.no_grad():
        values = evaluate_rollout(policy, early, torch.arange(8), FLOAT32).values
    assert (values - rollout.values[:-1]).abs().max() > 1e-3


@torch.no_grad()
def test_bfloat16_follows_float32_and_leaves_heads_and_memory_in_float32(played):
    policy, rollout = played
    envs = torch.arange(2)
    exact = evaluate_rollout(policy, rollout, envs, FLOAT32)
    rough = evaluate_rollout(policy, rollout, envs, Compute(torch.device("cpu"), True))
    assert rough.values.dtype == rough.hidden_states.dtype == torch.float32
    error = (rough.hidden_states - exact.hidden_states).abs().mean()
    assert 1e-6 < error < 0.02 * exact.hidden_states.std()


def test_images_in_bfloat16_are_those_that_autocast_makes():
    """All 256 values of a pixel are tested."""
    frames = torch.arange(256, dtype=torch.uint8).reshape(1, 8, 8, 4)
    images = networks.to_images(frames, dtype=torch.bfloat16)
    assert torch.equal(images, (frames.permute(0, 3, 1, 2).float() / 255).bfloat16())
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert networks.to_images(frames, channels_last=False, dtype=torch.bfloat16).is_contiguous()


def test_actions_are_drawn_with_their_probabilities():
    probabilities = torch.tensor([[0.1, 0.0, 0.6, 0.3]])
    draws = (torch.arange(10_000) + 0.5) / 10_000
    actions = draw_actions(probabilities.log().expand(10_000, 4), draws)
    shares = torch.bincount(actions, minlength=4) / 10_000
    torch.testing.assert_close(shares, probabilities[0], atol=1e-3, rtol=0)
    assert actions.diff().min() >= 0


def published_layouts(state):
    """Return the published layouts of agent files, given weights with ``init_hx``."""
    older = {key: tensor for key, tensor in state.items() if key != "init_hx"}
    return {"with init_hx": {"model_state_dict": state, "optimizer_state_dict": {}},
            "without": {"model_state_dict": older, "optimizer_state_dict": {}},
            "weights alone": {"state_dict": older}}


@pytest.mark.parametrize("layout", ["with init_hx", "without", "weights alone"])
@pytest.mark.parametrize("recurrent", [True, False])
def test_agents_of_every_published_layout_open_and_start_from_zeros(layout, recurrent, tmp_path):
    policy = tiny_policy(recurrent=recurrent)
    torch.save(published_layouts(dict(policy.state_dict()))[layout], tmp_path / "model_1.pth")
    opened = load_agent(tmp_path / "model_1.pth")
    assert opened.recurrent == recurrent
    assert not opened.initial_states(2).any()
    frames = np.random.RandomState(0).randint(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    hidden = torch.rand(3, policy.hidden_state_size)
    outputs = [run_policy(each, FLOAT32, frames, hidden) for each in (policy, opened)]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    save_agent(tmp_path / "again.pth", opened, {})
    assert not load_agent(tmp_path / "again.pth").initial_states(2).any()


@pytest.mark.parametrize("name, recurrent, width", [
    ("coinrun_hard_rec_78053376.pth", True, 64), ("maze_easy_corner_160022528.pth", False, 256)])
def test_real_published_agents_open(name, recurrent, width):
    folder = os.environ.get("PUBLISHED_AGENTS", ROOT.parent / "shared" / "published")
    path = Path(folder) / name
    if not path.is_file():
        pytest.skip(f"{name} was not found; set PUBLISHED_AGENTS to its folder")
    policy = load_agent(path)
    assert (policy.recurrent, policy.hidden_state_size) == (recurrent, width)
    assert not policy.initial_states(1).any()


# The max-pool of bfloat16 images, compared with torch's

def pictures(*shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)


def both(x):
    """Return output and gradient of PyTorch's pooling in float32, and of ours."""
    found = []
    for pool, given in ((lambda x: functional.max_pool2d(x, 3, 2, 1), x.float()),
                        (ParallelMaxPool.apply, x)):
        given = given.requires_grad_()
        pooled = pool(given)
        weights = pictures(*pooled.shape, seed=1).to(pooled.dtype)
        gradient, = torch.autograd.grad(pooled, given, weights)
        found.append((pooled.detach().to(torch.bfloat16), gradient.to(torch.bfloat16)))
    return found


@pytest.mark.parametrize("shape", [(2, 32, 16, 8), (1, 8, 2, 2), (5, 24, 4, 6)])
def test_same_numbers_as_torch(shape):
    x = pictures(*shape)
    assert can_pool(x)
    (expected, expected_gradient), (pooled, gradient) = both(x)
    assert pooled.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pooled, expected)
    # Both add in float32 and round once.
    assert torch.equal(gradient, expected_gradient)


def test_first_of_equal_values_gets_the_gradient():
    x = torch.randint(-1, 2, (4, 16, 12, 12), generator=torch.Generator().manual_seed(2))
    (expected, expected_gradient), (pooled, gradient) = both(
        x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last))
    assert torch.equal(pooled, expected) and torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("value", ["nan", "-nan", "inf"])
def test_values_that_are_no_numbers(value):
    x = pictures(1, 8, 6, 6)
    # Processors produce a negative NaN, which float() cannot create.
    number = (torch.tensor(-0x40, dtype=torch.int16).view(torch.bfloat16) if value == "-nan"
              else torch.tensor(float(value), dtype=torch.bfloat16))
    x[0, 0, 2, 3] = number
    x[0, 1] = number
    assert np.signbit(x[0, 0, 2, 3].float().item()) == value.startswith("-")
    expected = functional.max_pool2d(x.float(), 3, 2, 1).to(torch.bfloat16)
    torch.testing.assert_close(ParallelMaxPool.apply(x), expected, equal_nan=True, rtol=0, atol=0)


def test_network_uses_it_where_it_can_and_torch_elsewhere():
    pool = networks.HalvingMaxPool()
    for x in (pictures(2, 16, 8, 8), pictures(2, 16, 8, 8).float(), pictures(2, 12, 8, 8),
              pictures(2, 16, 8, 8).contiguous()):
        name = pool(x.requires_grad_()).grad_fn.name()
        assert ("ParallelMaxPool" in name) == can_pool(x)
        assert torch.equal(pool(x), functional.max_pool2d(x, 3, 2, 1))
    assert [can_pool(pictures(2, 16, 8, 8)), can_pool(pictures(2, 16, 8, 8).float()),
            can_pool(pictures(2, 12, 8, 8)), can_pool(pictures(2, 16, 8, 8).contiguous()),
            can_pool(pictures(2, 16, 7, 8))] == [True, False, False, False, False]


@pytest.mark.slow
def test_threads_pool_as_one_does_and_their_number_stays():
    """This needs a new process, because numba sets the number only when it first runs."""
    code = ("import sys, torch; sys.path.insert(0, 'tests'); "
            "from test_policy import both, pictures; "
            "torch.set_num_threads(2); x = both(pictures(5, 24, 4, 6)); import numba; "
            "assert all(map(torch.equal, *x)); "
            "print(torch.get_num_threads(), numba.get_num_threads())")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                          env=dict(os.environ, OMP_NUM_THREADS="3", NUMBA_NUM_THREADS="3"))
    assert done.stdout.split() == ["2", "2"], done.stderr
