"""Options: dataclasses from which command-line flags are derived."""

import dataclasses
from pathlib import Path

import pytest

from common.cli import count, share
from common.errors import UserError
from common.options import Options, ParameterOptions, command, option, parse


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


@pytest.mark.parametrize(("flag", "value", "message"), [
    ("num_levels", 0, "must be a whole number from 1"), ("part", 1.5, "must lie between 0 and 1"),
    ("colour", "bleu", "blue"), ("steps", (3, 0), "must be a whole number from 1")])
def test_a_call_refuses_what_the_command_line_refuses(flag, value, message, capsys):
    with pytest.raises(UserError, match=f"{flag}.*{message}"):
        Walk(agent_file="a.pth", **{flag: value})
    with pytest.raises(SystemExit):
        values(f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,)))
    error = capsys.readouterr().err
    assert f"--{flag}" in error and message in error


def test_a_missing_option_is_an_error(capsys):
    with pytest.raises(SystemExit):
        parse(Walk, [])
    assert "--agent_file" in capsys.readouterr().err


def test_given_options_are_those_of_the_command_line():
    assert parse(Walk, ["--agent_file", "a", "--num_levels", "7"]).given == {"agent_file",
                                                                             "num_levels"}
    assert Walk(agent_file="a", num_levels=8).given == {"agent_file", "num_levels"}


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
    assert command(Sum, lambda options: 3)(["--numbers", "3"]) == 3
