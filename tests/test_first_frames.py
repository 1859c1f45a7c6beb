"""Unseen levels that start with the first frame of a known level, and evaluation without them."""

import dataclasses
import json

import numpy as np
import pytest

import evaluate
from common.errors import UserError
from envs.procgen_env import EnvConfig, LevelSlots, draw_new_levels, first_frames

KNOWN = EnvConfig("coinrun", "easy", start_level=3, num_levels=300)


@pytest.mark.parametrize(("game", "mode"), [("coinrun", "easy"), ("maze", "hard")])
def test_first_frames_are_those_of_episodes(game, mode):
    config, levels = EnvConfig(game, mode), [7, 7, 12345, 0, 2**31 - 2]
    slots = LevelSlots(config, 1)
    for level, frame in zip(levels, first_frames(config, levels), strict=True):
        slots.start(0, level)
        assert np.array_equal(frame, slots.frames[0])
    slots.close()


def test_levels_that_look_like_known_ones_are_left_out():
    known = {frame.tobytes() for frame in first_frames(KNOWN, KNOWN.levels)}
    unseen = KNOWN.unseen_levels()
    drawn = unseen.draw_levels(60, 5)
    alike = {level for level, frame in zip(drawn, first_frames(KNOWN, drawn))
             if frame.tobytes() in known}
    assert alike  # easy levels without backgrounds do look alike
    expected = [level for level in drawn if level not in alike]
    new, share = draw_new_levels(KNOWN, len(expected) + 5, 5)
    assert new[:len(expected)] == expected and len(set(new)) == len(expected) + 5
    assert not {frame.tobytes() for frame in first_frames(KNOWN, new)} & known
    assert share == pytest.approx(len(alike) / 60, abs=0.15)
    hard = dataclasses.replace(KNOWN, distribution_mode="hard", use_backgrounds=True, num_levels=9)
    assert draw_new_levels(hard, 10, 0) == (hard.unseen_levels().draw_levels(10, 0), 0)
    with pytest.raises(UserError, match="need num_levels"):
        draw_new_levels(EnvConfig("coinrun", "easy"), 3, 0)


@pytest.mark.slow
def test_evaluation_plays_only_new_levels(agent_path, tmp_path, capsys):
    flags = ["--agent_file", str(agent_path), "--env_name", "coinrun", "--num_levels", "100",
             "--num_episodes", "3", "--device", "cpu", "--new_first_frames"]
    assert evaluate.main([*flags, "--output", str(tmp_path / "unseen.json")]) == 0
    result = json.loads((tmp_path / "unseen.json").read_text())
    assert result["new_first_frames"] and 0 <= result["share_left_out"] < 1
    assert "of the drawn unseen levels is that of a known level" in capsys.readouterr().out
    assert evaluate.main([*flags, "--training_levels"]) == 2
    assert "leave --training_levels" in capsys.readouterr().err
