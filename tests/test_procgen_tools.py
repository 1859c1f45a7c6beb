"""The examples of docs/coming_from.md, and the state variables of procgen-tools."""

import importlib
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, tiny_policy

from agents.agent_file import save_agent
from envs.maze.levels import load_levels
from envs.maze.state import stock_state

PAGE = ROOT / "docs/coming_from.md"
AGENT = "maze_easy_corner_160022528.pth"
# In the order in which that README prints them.
STATE_VALUES = """SERIALIZE_VERSION game_name options.paint_vel_info options.use_generated_assets
    options.use_monochrome_assets options.restrict_themes options.use_backgrounds
    options.center_agent options.debug_mode options.distribution_mode
    options.use_sequential_levels options.use_easy_jump options.plain_assets options.physics_mode
    grid_step level_seed_low level_seed_high game_type game_n level_seed_rand_gen.is_seeded
    level_seed_rand_gen.str rand_gen.is_seeded rand_gen.str step_data.reward step_data.done
    step_data.level_complete action timeout current_level_seed prev_level_seed
    episodes_remaining episode_done last_reward_timer last_reward default_action
    fixed_asset_seed cur_time is_waiting_for_step grid_size ents.size ents use_procgen_background
    background_index bg_tile_ratio bg_pct_x char_dim last_move_action move_action special_action
    mixrate maxspeed max_jump action_vx action_vy action_vrot center_x center_y
    random_agent_start has_useful_vel_info step_rand_int asset_rand_gen.is_seeded
    asset_rand_gen.str main_width main_height out_of_bounds_object unit view_dim x_off y_off
    visibility min_visibility w h data.size data maze_dim world_dim"""
RENAMED = {"SERIALIZE_VERSION": "version", "game_name": "game",
           "level_seed_rand_gen": "level_generator", "rand_gen": "game_generator",
           "asset_rand_gen": "picture_generator", "w": "width", "h": "height",
           "data.size": "grid.count", "data": "cells", "str": "text", "ents.size": "entities.count"}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an agent file at the path of the published code: a published agent if
    available, otherwise an untrained one."""
    published = Path(os.environ.get("PUBLISHED_AGENTS", ROOT.parent / "shared/published")) / AGENT
    target = tmp_path / "trained_models/maze_I/model_rand_region_5.pth"
    target.parent.mkdir(parents=True)
    if published.is_file():
        shutil.copy(published, target)
    else:
        save_agent(target, tiny_policy(recurrent=False), {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_of_python_runs_and_does_what_it_says(folder, capsys):
    names = {}
    for block in blocks("python"):
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["state"].to_bytes() == stock_state("hard", 0).to_bytes()
    assert (names["moved"].grid.cheese, names["moved_frame"].shape) == ((6, 7), (64, 64, 3))
    assert (names["moved_frame"] != names["frame"]).any()
    assert names["image"].shape == (512, 512, 3)
    assert (names["frames"][0] == names["frame"]).all()
    assert (names["frames"][1] == names["moved_frame"]).all()
    assert names["mine"].grid.maze_dim == 5 and names["mine"].grid.world_dim == 25
    assert names["rewards"].tolist() == [0, 10, 0]  # the cheese was moved next to the mouse
    assert names["layer"].name == "embedder.block2.res1.resadd"
    original, modified = names["original"], names["modified"]
    assert len(original.squares) == len(names["state"].grid.squares(without_cheese=True))
    assert np.abs(original.probs - modified.probs).max() > 1e-4
    assert Path("fields.png").stat().st_size > 10_000
    assert capsys.readouterr().out.startswith("0 13 row 11, column 6")


def test_every_command_runs_and_writes(folder):
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 3
    for python, option, module, *words in commands:
        assert (python, option) == ("python", "-m")
        assert importlib.import_module(module).main(words) == 0
    assert len(load_levels(Path("forks"))) == 52
    assert load_levels(Path("moved"))[0].grid.cheese == (6, 7)
    assert len(list(Path("fields").rglob("field_*.npz"))) == 4


def test_every_state_variable_of_the_published_code_has_its_field():
    def ours(name):
        words = [RENAMED.get(word, word) for word in name.split(".")]
        return RENAMED.get(name) or ".".join(words)

    fields = list(stock_state("hard", 0).fields())
    ends = {field.rpartition(".")[2] for field in fields if "_generator" not in field}
    for name in STATE_VALUES.split():
        found = ours(name)
        if name == "ents":
            assert "entities[0].x" in fields
        elif "_generator" in found or name.startswith("options."):
            assert found in fields
        else:
            assert found in fields or found.rpartition(".")[2] in ends, name
