"""Stages of the studies of maze agents.

The stages of the individual agents come first, followed by stages that use all agents. Channels are
selected on one set of levels and tested on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from maze.studies import claims
from maze.studies.claims import CLAIMS
from pipeline.presets import MAZE_AGENT, MazePieces, MazePreset, place_of
from pipeline.stage import MAZE_PAGE, OUTPUT, Stage, from_start, number_of, success_rate

ROOM = "analysis/maze"  # relative to the output folder
TABLE = "maze_table"
COEFFICIENTS = ("-1", "-0.5", "0.5", "1", "2")
CORNER_COEFFICIENTS = ("-2", "-1", "0.5", "1", "5", "10", "20")
EVERYWHERE = "-0.05"  # coefficient at all layers at once
OFFSETS = ("1", "2", "3", "5")
# value to which a cell is set in all chosen channels; in the strongest channel alone, it is 5.5
ALL_CHANNELS_VALUE = "1"
EXACT_FORKS = 20  # number of forks with exact probabilities for the top right vector
CHOOSING = ("--start_level", "0", "--num_levels", "1000000")
REPORTING = ("--start_level", "1000000", "--num_levels", "1000000000")
FILM_STEPS = "100"


def maze_stages(preset: MazePreset) -> tuple[Stage, ...]:
    """Return all stages of the studies of maze agents, including the table of findings."""
    stages = [stage for name in preset.agents for stage in _AgentStages(preset, name).all()]
    tables = {f"{name}_{study}": (f"{ROOM}/{name}/{study}/**/*.csv",)
              for name in preset.agents for study in claims.STUDIES}
    tables |= {f"{name}_{claims.EVALUATED}_{place}": (
        f"{ROOM}/{name}/{claims.EVALUATED}/{place}.json",)
        for name in preset.agents for place in claims.PLACES}
    page = [_page("maze_page", [place_of(name) for name in preset.agents], [*preset.agents])
            ] if preset.page else []
    return (*stages, *page, Stage(
        TABLE, "maze.table",
        ("--studies", *(f"{OUTPUT}/{ROOM}/{name}" for name in preset.agents),
         "--output_dir", f"{OUTPUT}/{ROOM}/table"),
        (f"{ROOM}/table/*",), lambda output: CLAIMS.summary(output / ROOM / "table"),
        needs=tables, continued=from_start))


def pieces(preset: MazePieces | None, seed: int) -> list[Stage]:
    """Return the stages of the main experiment that study a maze agent.

    They draw the agent's vector fields in a few mazes, and export the maze page.

    Args:
        preset: agent and number of mazes; None for no stages.
        seed: seed of the mazes.
    """
    if preset is None:
        return []
    return [_fields("maze_fields", "fields", MAZE_AGENT, preset.num_mazes, seed),
            _page("maze_page", [MAZE_AGENT])]


class _AgentStages:
    """Builder of the stages of one agent; their names begin with the agent's name."""

    def __init__(self, preset: MazePreset, agent: str):
        self._preset, self._agent, self._place = preset, agent, place_of(agent)
        self._game = "--distribution_mode", preset.distribution_mode

    def all(self) -> list[Stage]:
        """Return all stages of the agent, in the order in which they run."""
        preset = self._preset
        forks, controls = str(preset.steering_forks), str(preset.num_controls)
        exact = ("--exact",) if preset.exact else ()
        both = ("--controls", "permuted", "gaussian")
        steer = {
            claims.STEERING: ("--num_mazes", forks, "--coefficients", *COEFFICIENTS, *both,
                               "--num_fields", "0"),
            claims.FIELDS: ("--num_mazes", str(preset.field_forks), "--coefficients", "-1",
                             *both, "--num_fields", str(preset.field_forks)),
            claims.SOURCES: ("--num_mazes", str(preset.source_forks), "--coefficients", "-1",
                              "--sources", "own", "same_square", "other", "mean", "--offsets",
                              *OFFSETS, "--num_fields", "0"),
            claims.LAYERS: ("--num_mazes", str(preset.layer_forks), "--coefficients", "-1",
                             "--layers", "each", "--num_fields", "0", "--num_vectors", "0"),
            claims.ALL_LAYERS: ("--num_mazes", str(preset.layer_forks), "--coefficients",
                                 EVERYWHERE, "--layers", "all", "--num_fields", "0",
                                 "--num_vectors", "0"),
            claims.TOP_RIGHT: ("--num_mazes", forks, "--vector", "top_right", "--coefficients",
                                *CORNER_COEFFICIENTS, "--num_fields",
                                str(min(EXACT_FORKS, preset.steering_forks)), *exact),
            claims.BOTH: ("--num_mazes", forks, "--compose", "--num_fields", "0"),
        }
        return [
            *(self._evaluated(name, region) for name, region in (
                (claims.REGION, preset.region), (claims.ANYWHERE, 0), (claims.CORNER, 1))),
            self._study(claims.BEHAVIOUR, "maze.behaviour", (
                "--kind", "fork", "--num_mazes", str(preset.behaviour_forks), "--max_tried",
                str(10 * preset.behaviour_forks), "--region", str(preset.region), "--regress",
                *exact)),
            *(self._study(name, "maze.steering", (*argv, "--num_controls", controls))
              for name, argv in steer.items()),
            self._study(claims.CHANNELS, "maze.channels", (
                "--kind", "fork", "--num_mazes", str(preset.channel_mazes), "--num_controls",
                controls), CHOOSING),
            *(self._of_channels(name, "maze.retargeting", (
                "--num_mazes", str(preset.retargeted_mazes), *argv)) for name, argv in (
                    (claims.RETARGETING, ("--strongest", "1", "--move_cheese")),
                    (claims.ALL_RETARGETING, ("--value", ALL_CHANNELS_VALUE)))),
            self._of_channels(claims.SCRUBBING, "maze.scrubbing", (
                "--num_mazes", str(preset.scrubbed_mazes))),
            _fields(f"{self._agent}_fields", f"{self._agent}/fields", self._place,
                    preset.drawn_mazes, preset.seed, self._game),
            *([self._films()] if preset.films else [])]

    def _evaluated(self, name: str, region: int) -> Stage:
        path = f"{ROOM}/{self._agent}/{claims.EVALUATED}/{name}.json"
        return Stage(
            f"{self._agent}_{claims.EVALUATED}_{name}", "evaluate",
            ("--model_file", self._place, "--env_name", "maze", *self._game, "--cheese_region",
             str(region), "--num_episodes", str(self._preset.evaluated_levels), "--seed",
             str(self._preset.seed), "--output", f"{OUTPUT}/{path}"),
            (path,), success_rate(path), files=(self._place,), continued=from_start)

    def _study(self, name: str, script: str, argv: tuple[str, ...],
               levels: tuple[str, ...] = REPORTING,
               needs: Mapping[str, tuple[str, ...]] | None = None) -> Stage:
        folder = f"{ROOM}/{self._agent}/{name}"
        return Stage(
            f"{self._agent}_{name}", script,
            ("--agent_file", self._place, *self._game, *argv, *levels, "--seed",
             str(self._preset.seed), "--output_dir", f"{OUTPUT}/{folder}"),
            (f"{folder}/**/*.*",), number_of(f"{folder}/**/*.csv", "tables"),
            needs=needs or {}, files=(self._place,), clears=(folder,))

    def _of_channels(self, name: str, script: str, argv: tuple[str, ...]) -> Stage:
        table = f"{ROOM}/{self._agent}/channels/channels.csv"
        return self._study(name, script, (
            *argv, "--channels", f"{OUTPUT}/{table}", "--num_controls",
            str(self._preset.num_controls)), needs={f"{self._agent}_channels": (table,)})

    def _films(self) -> Stage:
        folder = f"{ROOM}/{self._agent}/rollouts"
        return Stage(
            f"{self._agent}_rollouts", "maze.rollouts",
            ("--agent_file", self._place, *self._game, "--kind", "fork", "--size", "9:13",
             "--num_mazes", str(self._preset.films), "--vectors", "cheese", "top_right",
             "--max_steps", FILM_STEPS, *REPORTING, "--seed", str(self._preset.seed),
             "--output_dir", f"{OUTPUT}/{folder}"),
            (f"{folder}/*",), number_of(f"{folder}/*.mp4", "films"), files=(self._place,),
            clears=(folder,))


def _fields(name: str, folder: str, agent: str, num_mazes: int, seed: int,
            game: tuple[str, ...] = ()) -> Stage:
    """Return the stage that draws the agent's vector fields in mazes with a fork.

    Fields are drawn with and without steering by the cheese vector and the top-right vector.
    Mazes have 9 to 13 squares per side, which leaves room for a path to the world's corner.
    """
    folder = f"{ROOM}/{folder}"
    return Stage(
        name, "maze.fields",
        ("--agent_file", agent, *game, "--kind", "fork", "--size", "9:13", "--num_mazes",
         str(num_mazes), "--vectors", "cheese", "top_right", *REPORTING, "--seed", str(seed),
         "--output_dir", f"{OUTPUT}/{folder}"),
        (f"{folder}/**/*.*",), number_of(f"{folder}/**/field_*.npz", "fields"), files=(agent,),
        clears=(folder,), max_shards=num_mazes)


def _page(name: str, agents: Sequence[str], names: Sequence[str] = ()) -> Stage:
    folder = f"{ROOM}/page"
    return Stage(
        name, "maze.page",
        ("--agent_file", *agents, *(("--name", *names) if names else ()),
         "--output_dir", f"{OUTPUT}/{folder}"),
        (f"{folder}/**/*.*",), number_of(f"{folder}/data/*.js", "files of data"),
        files=(*agents, MAZE_PAGE), clears=(folder,), continued=from_start)
