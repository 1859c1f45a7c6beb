"""Options: dataclasses from which command-line flags are derived."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from agents.goal_places import GoalGameOptions
from common.cli import count, output_file, share
from common.errors import UserError
from common.options import (
    CheckContentsOptions,
    Options,
    OutputFileOptions,
    ParameterOptions,
    ShardOptions,
    command,
    option,
    parse,
    parser_of,
    redefine,
)
from common.shards import Shard
from generative.flags import RandomSamplesOptions, SamplesOptions, SimulatorOptions
from interventions.flags import PatchOptions, PlayedDirectionOptions, SwapOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk(ParameterOptions):
    """Walk through levels.

    Further text.
    """

    agent_file: Path = option(help="agent")
    num_levels: int = option(7, "levels", type=count)
    steps: tuple[int, ...] = option((1, 2), "steps", type=count)
    part: float | None = option(None, "part of the levels", type=share)
    colour: str = option("red", "colour", choices=("red", "blue"), names=("--colour", "--color"))
    mirrored: bool = option(False, "mirror levels")
    films: bool = option(True, "write no films")
    lr: float | None = option(None, "learning rate", key="gen_model.lr")
    exp_name: str | None = option(None)


def values(*argv):
    return parse(Walk, ["--agent_file", "a.pth", *argv]).values


def test_flags_and_calls_give_the_same_options():
    assert values() == Walk(agent_file="a.pth").values
    flags = ("--num_levels", "3", "--steps", "4", "5", "--part", "0.5", "--color", "blue",
             "--mirrored", "--no_films", "--lr", "0.1", "--interpreting_params_name", "demo")
    called = Walk(agent_file="a.pth", num_levels=3, steps=[4, 5], part=0.5, colour="blue",
                  mirrored=True, films=False, lr=0.1, interpreting_params_name="demo")
    assert values(*flags) == called.values
    assert isinstance(called.agent_file, Path) and called.steps == (4, 5)
    texts = Walk(agent_file="a.pth", num_levels="3", steps="4", lr="0.1", part=np.float32(0.5))
    assert texts.num_levels == 3 and texts.steps == (4,) and texts.lr == 0.1 and texts.part == 0.5


@pytest.mark.parametrize(("flag", "value", "message"), [
    ("num_levels", 0, "must be a whole number from 1"), ("part", 1.5, "must lie between 0 and 1"),
    ("colour", "bleu", "blue"), ("steps", (3, 0), "must be a whole number from 1"),
    ("lr", "high", "invalid")])
def test_a_call_refuses_what_the_command_line_refuses(flag, value, message, capsys):
    with pytest.raises(UserError, match=f"{flag}.*{message}"):
        Walk(agent_file="a.pth", **{flag: value})
    with pytest.raises(SystemExit):
        values(f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,)))
    error = capsys.readouterr().err
    assert f"--{flag}" in error and message in error


def test_a_call_refuses_values_of_other_types():
    with pytest.raises(UserError, match="mirrored: must be True or False, not 'no'"):
        Walk(agent_file="a.pth", mirrored="no")
    with pytest.raises(UserError, match="num_levels: must be a whole number"):
        Walk(agent_file="a.pth", num_levels=2.5)


def test_a_missing_option_is_an_error(capsys):
    with pytest.raises(SystemExit):
        parse(Walk, [])
    assert "--agent_file" in capsys.readouterr().err


def test_given_options_are_those_of_the_command_line_or_the_call():
    assert parse(Walk, ["--agent_file", "a", "--num_levels", "7"]).given == {"agent_file",
                                                                             "num_levels"}
    assert Walk(agent_file="a", num_levels=7).given == {"agent_file", "num_levels"}


def test_options_with_a_key_override_the_parameter_set():
    assert Walk(agent_file="a", lr=0.25).parameters.flattened("gen_model")["gen_model.lr"] == 0.25
    assert Walk(agent_file="a").parameters.flattened("gen_model")["gen_model.lr"] != 0.25


def test_help_shows_the_description_and_the_options_of_base_classes_last(capsys):
    with pytest.raises(SystemExit):
        parse(Walk, ["--help"])
    text = capsys.readouterr().out
    assert "Walk through levels." in text and "Further text" not in text
    assert text.index("--agent_file") < text.index("--lr") < text.index("--interpreting_params")
    assert "exp_name" not in text and values("--exp_name", "x")["exp_name"] == "x"


def test_a_command_calls_its_function_and_reports_errors(capsys):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Sum(Options):
        """Add numbers."""

        numbers: tuple[int, ...] = option(help="numbers")

    found = []

    def add(options):
        if len(options.numbers) < 2:
            raise UserError("give two numbers")
        found.append(sum(options.numbers))
        return found

    main = command(Sum, add)
    assert main(["--numbers", "3", "4"]) == 0 and found == [7]
    assert main(["--numbers", "3"]) == 2 and "give two numbers" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True, kw_only=True)
class Play(GoalGameOptions, PatchOptions, SwapOptions, PlayedDirectionOptions, ShardOptions):
    """Play levels."""

    ignored = ("num_threads",)
    hidden = ("reference_seed",)

    num_episodes: int = option(3, "episodes to play", type=count)
    shard: Shard = redefine(ShardOptions, "shard", help="part of the episodes")


def test_a_flag_and_its_opposite_set_one_option(capsys):
    assert parse(Play, []).use_backgrounds is None
    assert parse(Play, ["--use_backgrounds"]).use_backgrounds is True
    assert parse(Play, ["--no_backgrounds"]).use_backgrounds is False
    assert not parse(Play, ["--no_backgrounds"]).env_config().use_backgrounds
    assert Play(env_name="maze", use_backgrounds=True).env_config().use_backgrounds
    with pytest.raises(SystemExit):
        parse(Play, ["--no_backgrounds", "--use_backgrounds"])
    assert "exclude each other" in capsys.readouterr().err


def test_repeated_flags_accumulate():
    patches = ("zero@embedder.block2.res1.resadd:55", "zero@embedder.block2.res1.resadd:7")
    parsed = parse(Play, [word for patch in patches for word in ("--patch", patch)])
    assert parsed.patch == patches and parse(Play, []).patch == () and len(parsed.patch_list) == 2
    assert Play(patch=list(patches)).values == parsed.values


def test_hidden_and_ignored_flags_are_accepted_but_not_shown(capsys):
    parsed = parse(Play, ["--num_threads", "4", "--reference_seed", "2"])
    assert parsed.reference_seed == 2 and "num_threads" not in parsed.values
    with pytest.raises(SystemExit):
        parse(Play, ["--help"])
    text = capsys.readouterr().out
    assert "reference_size" in text and "reference_seed" not in text and "num_threads" not in text


def test_a_changed_option_keeps_its_other_arguments():
    assert Play(shard="2/3").shard == Shard(2, 3) == parse(Play, ["--shard", "2/3"]).shard
    [action] = (action for action in parser_of(Play)._actions if action.dest == "shard")
    assert (action.help, action.metavar) == ("part of the episodes", "I/N")
    with pytest.raises(UserError, match="shard: must be 1/4"):
        Play(shard="4/3")


def test_directions_of_a_script_with_its_own_number_of_episodes(tmp_path):
    options = Play(precomp_dir=tmp_path, num_direction_episodes=8)
    assert options.directions_folder == tmp_path
    assert options.direction_episodes == 8 and options.num_episodes == 3
    assert options.swap() is None
    swap = dataclasses.replace(options, swap_directions_from=[1], swap_directions_to=["2"],
                               random_directions=5).swap()
    assert swap.name == "random_5_1_to_2"


def test_options_of_a_simulator(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Simulate(SimulatorOptions, SamplesOptions, RandomSamplesOptions):
        """Simulate."""

        precision: str = redefine(SimulatorOptions, "precision", default="float32")

    parsed = parse(Simulate, ["--agent_file", "a", "--model_file", "m", "--device", "cpu",
                              "--generated_data_dir", str(tmp_path), "--exp_name", "x"])
    assert parsed.compute.precision == "float32" and parsed.batch_size == 32
    assert parsed.samples.path == tmp_path / "informed_init"
    assert parsed.random_samples.path == tmp_path / "rand_init"
    assert issubclass(Simulate, CheckContentsOptions)


def test_an_output_file_of_another_script_is_kept(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Write(OutputFileOptions):
        """Write."""

        output: Path = option(help="file", type=output_file)

    (tmp_path / "a").touch()
    Write(output=tmp_path / "b").check_output()
    Write(output=tmp_path / "a").check_output(lambda path: True)
    Write(output=tmp_path / "a", overwrite=True).check_output()
    with pytest.raises(UserError, match="choose another --output"):
        Write(output=tmp_path / "a").check_output()
    with pytest.raises(UserError, match="output: must be a file"):
        Write(output=tmp_path)
