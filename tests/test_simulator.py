"""The simulator compared with golden numbers, its two passes with each other, and its files."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from conftest import (
    FLOAT32,
    GOLDEN,
    assert_same,
    golden_projector,
    golden_weight,
    module_of_layout,
    tiny_policy,
)

from agents.agent_file import load_agent
from common.errors import UserError
from generative.batches import align
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset, Windows
from generative.losses import simulator_losses, until_first_terminal
from generative.networks import LatentSampler, clamp_image, most_likely_action
from generative.published import load_published, published_name, published_state, save_published
from generative.saliency.gradients import WITHOUT_ENV_GRADS, SaliencyPass, saliency_functions
from generative.simulator import Simulator, stack

MODE = LatentSampler("mode")
LAYOUT = json.loads((GOLDEN / "checkpoint_layout.json").read_text())
SMALL = SimulatorConfig(**json.loads((GOLDEN / "simulator_small_config.json").read_text()))
OPEN = dataclasses.replace(SMALL, agent_hidden_size=None)
SHOWN = {"images": "ims", "hidden_states": "hx", "log_probs": "act_log_prob", "values": "value",
         "rewards": "reward", "terminals": "terminal", "env_h": "env_h"}


@pytest.fixture(scope="module")
def golden():
    return {name: torch.from_numpy(array) for name, array in
            np.load(GOLDEN / "simulator_small.npz", allow_pickle=False).items()}


def write_published(path, layout, **changes):
    """Write a published file with the golden weights; a change of None omits a tensor."""
    state = {key: golden_weight(key, shape) for key, shape in LAYOUT[layout].items()}
    for key, tensor in changes.items():
        state[key] = tensor
    torch.save({"gen_model_state_dict": {key: tensor for key, tensor in state.items()
                                         if tensor is not None}}, path)
    return path


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "model_epoch0_batch0.pt"
    return write_published(path, "simulator_small")


@pytest.fixture
def simulator(small_file, published_agent):
    return load_published(small_file, SMALL, load_agent(published_agent)).simulator


@pytest.fixture(scope="module")
def batch(golden):
    actions = golden["data/action"]
    return align(Windows(frames=golden["data/ims"], actions=actions,
                         rewards=golden["data/reward"], values=torch.zeros(actions.shape),
                         terminals=golden["data/terminal"],
                         hidden_states=golden["data/hx"]), SMALL)


def assert_state(found, expected, name):
    torch.testing.assert_close(found.reshape(expected.shape), expected, atol=1e-4, rtol=0,
                               msg=lambda text: f"{name}: {text}")


def assert_loss(found, expected, name, rtol=1e-5):
    """Assert equality of a loss. The tolerance must detect the clamp, 6e-5 of the image loss."""
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=rtol,
                               msg=lambda text: f"{name}: {text}")


# Golden numbers

@torch.no_grad()
def test_training_pass_gives_the_golden_states(simulator, batch, golden):
    simulation = simulator(batch, MODE)
    assert_state(simulation.start.bottleneck_vec, golden["train/bottleneck_vec"], "vector")
    for name in ("prior_logits", "posterior_logits"):
        assert_state(getattr(simulation, name), golden[f"train/{name}"], name)
    for ours, theirs in SHOWN.items():
        assert_state(getattr(simulation, ours), golden[f"train/pred_{theirs}"], ours)


@torch.no_grad()
def test_losses_are_the_golden_ones(simulator, batch, golden):
    losses = simulator_losses(simulator(batch, MODE), batch, SMALL)
    found = {"loss_total": losses.total, "loss_model": losses.per_step,
             "loss_bottleneck": losses.bottleneck,
             "loss_agent_aux_init": losses.first_hidden + losses.first_action,
             "loss_reconstruction": (losses.image + losses.reward + losses.terminal
                                     + losses.agent_state),
             "loss_kl_rssm": losses.kl, "loss_env_update": losses.update,
             "loss_reconstr_ims": losses.image + losses.reward + losses.terminal,
             "loss_reconstr_agent_hs": losses.agent_state}
    assert {f"train/{name}" for name in found} == {name for name in golden if "/loss" in name}
    for name, loss in found.items():
        assert_loss(loss, golden[f"train/{name}"], name)


def test_gradient_norms_are_the_golden_ones(simulator, batch):
    simulator_losses(simulator(batch, MODE), batch, SMALL).total.backward()
    expected = json.loads((GOLDEN / "simulator_small_grad_norms.json").read_text())
    found = {published_name(name): float(parameter.grad.norm())
             for name, parameter in simulator.named_parameters() if parameter.requires_grad}
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["informed", "forced", "decode"])
def test_imagination_gives_the_golden_numbers(kind, simulator, batch, golden):
    vectors = (golden["decode/bottleneck_vec"] if kind == "decode"
               else simulator.encode(batch.initial_images))
    start = simulator.start_from(vectors, MODE)
    simulation = stack(start, simulator.imagine(
        start, MODE, true_actions=batch.actions if kind == "forced" else None))
    if kind == "informed":
        assert_state(vectors, golden["informed/bottleneck_vec"], "vector")
    if kind != "forced":
        assert_state(simulation.own_actions, golden[f"{kind}/action"], "actions")
    for ours, theirs in SHOWN.items():
        assert_state(getattr(simulation, ours), golden[f"{kind}/{theirs}"], ours)


@pytest.mark.parametrize(("names", "ending"), [
    (["value", "value_delta", "action", "leftwards", "jumping_up", "jumping_right",
      "hx_direction_3_ica"], ""), (["value", "action"], WITHOUT_ENV_GRADS)])
def test_saliency_of_one_pass_is_the_golden_one(simulator, golden, names, ending):
    functions = saliency_functions(names, [], "pca")
    one_pass = SaliencyPass(simulator, FLOAT32, golden["decode/bottleneck_vec"][None], functions,
                            [4], 6, bool(ending), golden_projector().coordinates)
    for name, function in zip(names, functions):
        gradients = one_pass.gradients(function)  # mean over three copies
        # At step 5, a ReLU is so close to its kink that rounding on the machine decides.
        rtol = 1e-2 if name == "value_delta" else 1e-5
        for ours, theirs in (("images", "ims"), ("hidden_states", "hx"), ("env_h", "env_h")):
            expected = golden[f"saliency/{name}{ending}/grad_{theirs}"]
            difference = getattr(gradients, ours)[0] - expected
            assert difference.norm() < rtol * expected.norm(), (name, ours)


# The two passes

@pytest.mark.parametrize("how", ["mode", "sample"])
def test_parallel_pass_equals_sequential_pass_with_gradients(simulator, batch, how):
    def seeded():
        return LatentSampler(how, torch.Generator().manual_seed(7))

    def sequential():
        draw = seeded()
        start = simulator.start_from(simulator.encode(batch.initial_images), draw)
        start = dataclasses.replace(start, agent_hidden=batch.first_hidden)
        simulation = stack(start, simulator.imagine(
            start, draw, true_actions=batch.actions, true_images=batch.images))
        # The auxiliary loss uses the predicted state, not the true one that replaces it.
        predicted = torch.tanh(simulator.hidden_converter(start.bottleneck_vec.detach()))
        return dataclasses.replace(
            simulation, start=dataclasses.replace(start, agent_hidden=predicted))

    gradients, simulations = [], []
    for simulation in (simulator(batch, seeded()), sequential()):
        simulator.zero_grad()
        simulator_losses(simulation, batch, SMALL).total.backward()
        simulations.append(simulation)
        gradients.append({name: parameter.grad.clone() for name, parameter
                          in simulator.named_parameters() if parameter.requires_grad})
    for field in dataclasses.fields(simulations[0]):
        if field.name not in ("start", "camera", "death_logits"):  # None, or not stored by both
            assert_state(getattr(simulations[0], field.name),
                         getattr(simulations[1], field.name), field.name)
    for name, gradient in gradients[0].items():
        difference = (gradient - gradients[1][name]).norm()
        assert difference < 1e-4 * gradient.norm(), name


@torch.no_grad()
def test_open_loop_windows_follow_the_prior_as_imagination_does(simulator, batch):
    num = batch.actions.shape[1]
    open_loop = torch.arange(num) == 1
    mixed, closed = simulator(batch, MODE, open_loop), simulator(batch, MODE)
    start = simulator.start_from(simulator.encode(batch.initial_images), MODE)
    start = dataclasses.replace(start, agent_hidden=batch.first_hidden)
    imagined = stack(start, simulator.imagine(start, MODE, true_actions=batch.actions))
    for name in ("env_h", "z", "images", "hidden_states", "values"):
        found = getattr(mixed, name)
        assert_state(found[:, open_loop], getattr(imagined, name)[:, open_loop], name)
        assert_state(found[:, ~open_loop], getattr(closed, name)[:, ~open_loop], name)
    assert not torch.equal(imagined.z, closed.z)


# Gradients of choices

def test_mode_takes_the_most_likely_class_and_samples_are_those_of_torch():
    probs = torch.softmax(torch.randn(50, 6, 7), dim=-1)
    assert torch.equal(LatentSampler("mode")(probs.log()).argmax(-1), probs.argmax(-1))
    expected = torch.multinomial(probs.reshape(-1, 7), 1,
                                 generator=torch.Generator().manual_seed(3)).reshape(50, 6)
    z = LatentSampler("sample", torch.Generator().manual_seed(3))(probs.log())
    assert torch.equal(z.argmax(dim=-1), expected)


def test_choices_have_the_gradients_of_their_soft_versions():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 3, 5, dtype=torch.float64)
    for choice, soft in ((most_likely_action(torch.log_softmax(logits, dim=-1)),
                          torch.log_softmax(logits, dim=-1)),
                         (MODE(logits), torch.softmax(logits, dim=-1)),
                         (clamp_image(logits), logits)):
        found, expected = (torch.autograd.grad((each * weights).sum(), logits)[0]
                           for each in (choice, soft))
        torch.testing.assert_close(found, expected)
        assert choice.min() >= -1e-9 and choice.max() <= 1 + 1e-9


# Losses

def test_nothing_counts_after_the_first_terminal_step_even_if_it_is_step_zero():
    terminals = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 1]])
    expected = torch.tensor([[1.0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 0]])
    assert torch.equal(until_first_terminal(terminals), expected)


def test_windows_of_another_length_are_refused():
    windows = RolloutDataset(GOLDEN / "dataset" / "data", 3, 6).batch([20, 4])
    with pytest.raises(UserError, match="8 frames, but num_init_steps 3 and num_sim_steps 7 need"):
        align(windows, dataclasses.replace(SMALL, num_sim_steps=7))


# The agent inside the simulator

def test_training_leaves_the_agent_as_it_was(simulator, batch):
    before = {name: tensor.clone() for name, tensor in simulator.state_dict().items()}
    simulator.train()
    agent = simulator.agent
    assert not agent.training and not agent.policy.training and simulator.cell.training
    optimizer = torch.optim.Adam(simulator.parameters(), lr=0.01)
    simulator_losses(simulator(batch, MODE), batch, SMALL).total.backward()
    optimizer.step()
    assert all(p.grad is None and not p.requires_grad for p in agent.parameters())
    assert len(list(agent.parameters())) > 30
    for name, tensor in simulator.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("agent."), name


def test_agents_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"256 hidden units and 15 actions, but .* is 64"):
        Simulator(SMALL, tiny_policy(recurrent=False))


def test_the_size_of_the_agents_state_is_its_own_unless_given():
    for policy, size in ((tiny_policy(), 64), (tiny_policy(recurrent=False), 256)):
        simulator = Simulator(OPEN, policy)
        assert simulator.config == dataclasses.replace(OPEN, agent_hidden_size=size)
        start = simulator.start_from(simulator.random_vectors(2), MODE)
        assert start.agent_hidden.shape == (2, size)
        assert (start.agent_hidden > 0).all() == (size == 256)  # like its states


@pytest.mark.parametrize(("change", "message"), [
    ({"num_init_steps": 1}, "num_init_steps must be at least 2"),
    ({"kl_balance": 1.5}, "kl_balance must lie between 0 and 1"),
    ({"stoch_dim": 9}, "env_h_stoch_size must be stoch_dim . stoch_discrete = 72, not 64")])
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SMALL, **change)


def test_layer_norm_can_be_left_out():
    simulator = Simulator(dataclasses.replace(SMALL, layer_norm=False), tiny_policy())
    names = set(dict(simulator.named_parameters()))
    assert not any(name.startswith(("cell.in_norm", "decoder.reward.1.")) for name in names)
    assert "cell.gru.reset_norm.weight" in names


# Published files

def test_published_file_at_default_sizes_loads_and_is_written_back(tmp_path, published_agent):
    path = write_published(tmp_path / "model_epoch9_batch0.pt", "simulator_defaults")
    read = load_published(path, SimulatorConfig(), load_agent(published_agent))
    size = sum(parameter.numel() for parameter in read.simulator.trainable_parameters())
    never_used = sum(tensor.numel() for key, tensor in read.unused.items()
                     if key.startswith("agent_env_stepper.decoder.vecobs."))
    assert size == 28_701_964
    assert size + never_used == pytest.approx(29.8e6, abs=0.05e6)  # count of the published model

    again = tmp_path / "again.pt"
    save_published(again, read.simulator, read.unused, more={"epoch": 9})
    found = torch.load(again, weights_only=True)
    expected = torch.load(path, weights_only=True)["gen_model_state_dict"]
    assert found["epoch"] == 9
    assert found["gen_model_state_dict"].keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found["gen_model_state_dict"][key], tensor), key


def test_a_new_simulator_is_written_in_the_published_layout():
    simulator = Simulator(SimulatorConfig(), tiny_policy())
    state = published_state(simulator)
    assert [(key, list(tensor.shape)) for key, tensor in state.items()] == list(
        LAYOUT["simulator_defaults"].items())
    own = {published_name(name) for name, _ in simulator.named_parameters()
           if not name.startswith("agent.")}
    for key in state.keys() - own:
        assert "vecobs" in key or key.startswith("conv_out.")
        assert not key.endswith("model.0.weight") or not state[key].any()


def trained_a_step(simulator, batch):
    optimizer = torch.optim.Adam(simulator.trainable_parameters())
    simulator_losses(simulator(batch, MODE), batch, SMALL).total.backward()
    optimizer.step()
    return optimizer


def test_published_scripts_go_on_from_our_simulator_files(simulator, batch, tmp_path):
    optimizer = trained_a_step(simulator, batch)
    save_published(tmp_path / "model.pt", simulator, optimizer_state=optimizer.state_dict())
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    theirs = module_of_layout(LAYOUT["simulator_small"])
    published = torch.optim.Adam(theirs.parameters())
    theirs.load_state_dict(content["gen_model_state_dict"])
    published.load_state_dict(content["optimizer_state_dict"])
    moments = {name: published.state[parameter]["exp_avg"]
               for name, parameter in theirs.named_parameters() if parameter in published.state}
    expected = {published_name(name): optimizer.state[parameter]["exp_avg"]
                for name, parameter in simulator.named_parameters() if parameter.requires_grad}
    assert_same(dict(sorted(moments.items())), dict(sorted(expected.items())))

    save_published(tmp_path / "weights.pt", simulator.requires_grad_(False))
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    published = torch.optim.Adam(theirs.parameters())
    published.load_state_dict(weights["optimizer_state_dict"])
    assert not published.state


def test_the_optimiser_of_a_published_simulator_is_read_and_of_our_older_files(
        simulator, batch, published_agent, tmp_path):
    optimizer = trained_a_step(simulator, batch)
    path = tmp_path / "model.pt"
    save_published(path, simulator, optimizer_state=optimizer.state_dict())
    content = torch.load(path, weights_only=True)
    published = load_published(path, SMALL, load_agent(published_agent))
    assert_same(published.moments, dict(optimizer.state_dict()["state"]))

    torch.save({**content, "optimizer_state_dict": optimizer.state_dict()}, path)
    older = load_published(path, SMALL, load_agent(published_agent))
    assert_same(older.moments, published.moments)

    first, *others = content["optimizer_state_dict"]["state"]
    swapped = {first: content["optimizer_state_dict"]["state"][others[-1]]}
    torch.save({**content, "optimizer_state_dict": {**content["optimizer_state_dict"],
                                                    "state": swapped}}, path)
    with pytest.raises(UserError, match=r"does not fit the tensor 'conv_in\..*weight'"):
        load_published(path, SMALL, load_agent(published_agent))


KEY = "agent_env_stepper.post_mlp_e.weight"


@pytest.mark.parametrize(("changes", "message"), [
    ({KEY: None}, f"there is no tensor '{KEY}'"),
    ({KEY: torch.zeros(96, 9)}, rf"tensor '{KEY}' has the shape \(96, 9\), not \(96, 1024\)"),
    ({"encoder.extra": torch.zeros(1)}, "has no tensor 'encoder.extra'"),
])
def test_files_of_other_simulators_are_refused_naming_the_tensor(
        tmp_path, published_agent, changes, message):
    path = write_published(tmp_path / "model.pt", "simulator_small", **changes)
    with pytest.raises(UserError, match=message) as error:
        load_published(path, SMALL, load_agent(published_agent))
    assert str(path) in str(error.value)
