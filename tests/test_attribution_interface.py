"""``from attribution import run``: the published call."""

import subprocess
import sys

import pytest
from conftest import PATIENCE, ROOT, tiny_policy

import attribution
import record
from agents.agent_file import AgentOrigin, save_agent
from attribution import attribute, features, page
from common.errors import UserError


@pytest.fixture
def called(monkeypatch):
    """Options with which ``run`` calls the scripts, if its second recording is long enough."""
    found = []

    def record_rows(options):
        data = options.logdir / "data"
        data.mkdir(parents=True, exist_ok=True)
        rows = [f"{row},{row // 100}\n" for row in range(6400)]
        (data / "idx_to_episode.csv").write_text("global_step,episode\n" + "".join(
            rows[:6400 if len(found) > 1 else 2]))

    for script in (record, features, attribute, page):
        monkeypatch.setattr(script.main, "function", lambda options, script=script: (
            found.append(options), script is record and record_rows(options)))
    return found


def test_the_published_keywords_become_options_of_the_scripts(called, tmp_path):
    agent = tmp_path / "agent.pth"
    save_agent(agent, tiny_policy(), origin=AgentOrigin(use_backgrounds=True))
    layers = {"name_contains_one_of": ["block2", "block3"], "discard_first_n": 1,
              "input_layer_include": True}
    assert attribution.run(
        agent, output_dir=tmp_path / "run", trajectories_kwargs={"num_envs": 4, "num_steps": 100},
        observations_kwargs={"num_obs": 16}, layer_kwargs=layers, attr_policy=True,
        attr_integrate_steps=10, nmf_features=6, trajectory_bookmarks=3, gae_gamma=0.9
    ) == tmp_path / "run" / "page" / "index.html"
    assert layers["name_contains_one_of"] == ["block2", "block3"] and len(layers) == 3
    first, more, of_features, of_attribution, of_page = called
    assert first.num_episodes == 32 and more.num_episodes == 64
    assert first.use_backgrounds and first.distribution_mode == "hard" and first.no_action_noise
    assert of_features.layers == ("block3",)
    assert of_features.num_observations == 512 and of_features.nmf_features == 6
    assert of_attribution.layers == ("input", "block3")
    assert of_attribution.outputs == ("value", "policy")
    assert of_attribution.features_dir == of_page.features_dir == of_features.output_dir
    assert (of_attribution.num_trajectories, of_attribution.num_steps,
            of_attribution.integrate_steps) == (4, 100, 10)
    assert of_page.attribution_dir == of_attribution.output_dir
    assert (of_page.bookmarks, of_page.gamma, of_page.lmbda) == (3, 0.9, None)


def test_keywords_without_a_meaning_are_refused_with_the_reason(tmp_path):
    for keywords, words in (
            ({"attr_max_paths": 2}, "'attr_max_paths' is not supported: the sums along"),
            ({"trajectories_kwargs": {"num_step": 3}}, "did you mean 'num_steps'"),
            ({"toString": 1}, "there is no keyword 'toString'")):
        with pytest.raises(UserError, match=words):
            attribution.run(tmp_path / "agent.pth", output_dir=tmp_path / "run", **keywords)
    assert not list(tmp_path.iterdir())
    save_agent(tmp_path / "agent.pth", tiny_policy())
    with pytest.raises(UserError, match="selects no layer of block1, block2, block3"):
        attribution.run(tmp_path / "agent.pth", output_dir=tmp_path / "run",
                        layer_kwargs={"name_contains_one_of": "conv"})


def test_the_package_is_imported_without_what_the_scripts_need():
    code = "import sys, attribution\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE)
    with pytest.raises(AttributeError, match="'attribution' has no attribute 'walk'"):
        attribution.walk  # noqa: B018
