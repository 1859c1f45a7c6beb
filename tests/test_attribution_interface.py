"""``from attribution import run``: the published call."""

import subprocess
import sys

import pytest
from conftest import PATIENCE, ROOT, tiny_policy

import attribution
import record
from agents.agent_file import AgentOrigin, save_agent
from attribution import attribute as attribute_script
from attribution import features as features_script
from attribution import page as page_script
from common.errors import UserError
from common.options import parser_of


def flag(command, name):
    return command[command.index(name) + 1]


def scripts_of(agent, folder, **keywords):
    """Return the commands that `run` starts, if its second recording is long enough."""
    commands = []

    def start(command, check, env):
        assert check and str(ROOT) in env["PYTHONPATH"]
        commands.append(command)
        data = folder / "recording" / "data"
        if command[2] == "record" and len([c for c in commands if c[2] == "record"]) == 2:
            data.mkdir(parents=True, exist_ok=True)
            rows = "".join(f"{row},{row // 100}\n" for row in range(6400))
            (data / "idx_to_episode.csv").write_text("global_step,episode\n" + rows)
        elif command[2] == "record":
            data.mkdir(parents=True)
            (data / "idx_to_episode.csv").write_text("global_step,episode\n0,0\n1,0\n")

    page = attribution.run(agent, output_dir=folder, start=start, **keywords)
    assert page == folder / "page" / "index.html"
    return commands


def test_the_published_keywords_become_the_flags_of_the_scripts(tmp_path):
    agent = tmp_path / "agent.pth"
    save_agent(agent, tiny_policy(), origin=AgentOrigin(use_backgrounds=True))
    layers = {"name_contains_one_of": ["block2", "block3"], "discard_first_n": 1,
              "input_layer_include": True}
    commands = scripts_of(
        agent, tmp_path / "run", trajectories_kwargs={"num_envs": 4, "num_steps": 100},
        observations_kwargs={"num_obs": 16}, layer_kwargs=layers, attr_policy=True,
        attr_integrate_steps=10, nmf_features=6, trajectory_bookmarks=3, gae_gamma=0.9)
    assert layers["name_contains_one_of"] == ["block2", "block3"] and len(layers) == 3
    names = [command[2] for command in commands]
    assert names == ["record", "record", "attribution.features", "attribution.attribute",
                     "attribution.page"]
    assert all(command[:2] == [sys.executable, "-m"] for command in commands)
    first, more, features, attribute, page = commands
    assert (flag(first, "--num_episodes"), flag(more, "--num_episodes")) == ("32", "64")
    assert "--use_backgrounds" in first and flag(first, "--distribution_mode") == "hard"
    assert flag(features, "--layers") == "block3"
    assert (flag(features, "--num_observations"), flag(features, "--nmf_features")) == ("512", "6")
    assert attribute[attribute.index("--layers") + 1:][:3] == ["input", "block3", "--outputs"]
    assert "input" not in features
    assert attribute[attribute.index("--outputs") + 1:][:2] == ["value", "policy"]
    assert (flag(attribute, "--num_trajectories"), flag(attribute, "--num_steps"),
            flag(attribute, "--integrate_steps")) == ("4", "100", "10")
    assert (flag(page, "--bookmarks"), flag(page, "--gamma")) == ("3", "0.9")
    assert "--lmbda" not in page
    modules = {"record": record, "attribution.features": features_script,
               "attribution.attribute": attribute_script, "attribution.page": page_script}
    for command in commands:  # the scripts accept the flags
        parser_of(modules[command[2]].main.options).parse_args(command[3:])


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


def test_the_former_name_of_the_package_prints_the_new_command():
    done = subprocess.run([sys.executable, "-m", "clarity.attribution", "--seed", "1"], cwd=ROOT,
                          capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("the package clarity is called attribution now; use: "
                           "python -m attribution.attribute --seed 1\n")
