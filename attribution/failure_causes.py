"""Count why an agent fails: with features taken out, with hazards invisible, and with random
edits of the same size, on the same levels with the same random draws.

A killed run continues after the last episode. Shards play the episodes of their arms; with --join
they are counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from agents.env_flags import add_env_flags, env_config
from agents.reference_set import MIN_PICTURES, played_reference
from attribution.failing.arms import (
    FailureArm,
    invisible_hazards,
    labels_of,
    original_and_edited,
    play_arm,
    with_controls,
)
from attribution.failing.causes import causes_of, what_is_known
from attribution.failing.counting import ANY, Failures, blindness, effects, rates
from attribution.failing.files import ORIGINAL, CausesFolder
from attribution.failing.films import draw, endings, first_failures, shoot, told_apart
from attribution.failing.report import plot, report
from common.cli import (
    Parser,
    add_compute_flags,
    count,
    environments,
    folder_name,
    from_zero,
    seed,
    set_up_logging,
    whole,
)
from common.devices import Compute, resolve_compute
from common.errors import UserError, script_main
from common.files import atomic_path, versions
from common.shards import WHOLE, add_shard_flags
from common.tables import write_table
from envs.procgen_env import EnvConfig
from interventions.flags import REFERENCE_SIZE
from stats.effects import check_starts


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, nargs="+", required=True,
                       help="the agent, then edited ones, from python -m attribution.edit_agent")
    flags.add_argument("--labels", nargs="+", type=folder_name,
                       help="names of these agents; those of their files if not given")
    flags.add_argument("--num_episodes", type=count, default=1000,
                       help="levels that every arm plays, one episode each")
    flags.add_argument("--num_controls", type=from_zero, default=20,
                       help="random edits of each edited agent, of the same size; 19 at least to "
                            "claim anything")
    flags.add_argument("--invisible", nargs="+", default=[], metavar="HAZARD",
                       help="hazards that the agent as it is also meets without seeing them, such "
                            "as saw")
    flags.add_argument("--num_films", type=from_zero, default=2,
                       help="films of each arm, of levels that only one of it and the agent as it "
                            "is fails")
    add_env_flags(flags)
    flags.add_argument("--training_levels", action="store_true",
                       help="play the levels of --start_level and --num_levels instead of those "
                            "outside")
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="episodes played at a time")
    flags.add_argument("--reference_size", type=whole(MIN_PICTURES, 10_000), default=REFERENCE_SIZE,
                       help="frames of other levels, on which the sizes of edits are measured")
    flags.add_argument("--seed", type=seed, default=0,
                       help="of levels, actions, controls and intervals")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/attribution/causes"),
                       help="folder to write to")
    flags.add_argument("--overwrite", action="store_true", help="throw away what is there")
    add_shard_flags(flags, "the arms")
    add_compute_flags(flags)
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    compute = resolve_compute(args.device, args.gpu_device, "float32"
                              if args.precision == "auto" else args.precision)
    config = env_config(args, args.agent_file[0])
    if not args.training_levels:
        config = config.unseen_levels()
    check_starts(args.num_episodes, "--num_episodes")
    if args.num_controls == 1:
        raise UserError("--num_controls must be 0, or at least 2, so that a control has others to "
                        "be compared with")
    labels = labels_of(args.agent_file, args.labels)
    levels = list(enumerate(config.draw_levels(args.num_episodes, args.seed)))
    shown, controls = arms_of(args, labels, compute, config, [level for _, level in levels])
    folder = CausesFolder(args.output_dir, config.env_name)
    folder.open({
        "env": vars(config), "num_episodes": args.num_episodes, "seed": args.seed,
        "precision": compute.precision, "reference_size": args.reference_size,
        "versions": versions(),
        "arms": {each.arm.name: each.made for each in (*shown, *controls)}}, args.overwrite,
        args.shard, args.join)
    for each in args.shard.of([*shown, *controls]):
        play_arm(each, folder, compute, config, levels, args.seed, args.num_envs)
    folder.finish_shard()
    if args.shard != WHOLE:
        return
    what = (f"{labels[0]} and what is compared with it, on {args.num_episodes} levels of "
            f"{config.env_name} ({config.distribution_mode}"
            f"{', with backgrounds' if config.use_backgrounds else ''}), the same for every arm, "
            f"with the same random draws. {what_is_known(config.env_name)}").strip()
    table = write_results(folder, shown, controls, config, args.seed, what)
    films = write_films(folder, shown, compute, config, args)
    failed = first_failures(folder.episodes(ORIGINAL))
    if len(failed) and not folder.failures_file.exists():
        draw(folder.failures_file, endings(shown[0], failed, compute, config, args.seed,
                                           args.num_envs))
    write_report(folder, table, films, len(failed), what, controls)
    print_table(table[0])
    print(f"wrote {folder.report_file}, {folder.figure_file.name}, {folder.causes_file.name}, "
          f"{folder.effects_file.name} and {len(films)} films")


def arms_of(args: argparse.Namespace, labels: Sequence[str], compute: Compute, config: EnvConfig,
            measured: Sequence[int]) -> tuple[list[FailureArm], list[FailureArm]]:
    """The arms that are shown, the original first, and the controls."""
    agents = original_and_edited(args.agent_file, labels, compute.device)
    controls: list[FailureArm] = []
    if args.num_controls and len(agents) > 1:
        reference = played_reference(agents[0].policy(), compute, config, measured,
                                     args.reference_size, args.seed)
        agents, controls = with_controls(agents, reference, args.num_controls, args.seed)
    pattern = controls[0].arm.pattern if controls else None
    return [*agents, *invisible_hazards(args.invisible, config.env_name, agents[0],
                                        pattern)], controls


Tables = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]  # causes.csv, effects.csv, blindness.csv


def write_results(folder: CausesFolder, shown: Sequence[FailureArm],
                  controls: Sequence[FailureArm], config: EnvConfig, seed: int,
                  what: str) -> Tables:
    """The tables and the figure, from the episodes in the folder."""
    causes = causes_of(config.env_name)
    found = {}
    for each in (*shown, *controls):
        episodes = folder.episodes(each.arm.name)
        found[each.arm.name] = Failures.of(episodes["cause"], folder.in_view(episodes), causes)
    arms = [each.arm for each in (*shown, *controls)]
    table = rates(arms, found, causes, seed)
    compared = [each for each in (*shown[1:], *controls)]
    differences = effects([each.arm for each in compared],
                          {each.arm.name: each.moved for each in compared}, found, ORIGINAL,
                          causes, seed)
    hidden = {each.made["invisible"]: each.arm.name for each in shown if "invisible" in each.made}
    blind = blindness([each.arm for each in shown[1:] if "invisible" not in each.made], hidden,
                      found, ORIGINAL, causes, seed)
    for path, written in ((folder.causes_file, table), (folder.effects_file, differences),
                          (folder.blindness_file, blind)):
        write_table(path, written)
    with atomic_path(folder.figure_file) as temporary:
        plot(temporary, table, what)
    return table, differences, blind


def write_films(folder: CausesFolder, shown: Sequence[FailureArm], compute: Compute,
                config: EnvConfig, args: argparse.Namespace) -> list[Path]:
    """Films of levels that only one of the original and another arm fails."""
    original, films = folder.episodes(ORIGINAL), []
    for each in shown[1:]:
        other = folder.episodes(each.arm.name)
        for number in told_apart(original, other, args.num_films):
            level = int(original["level_seed"][number])
            films.append(folder.film(each.arm.name, level))
            if not films[-1].exists():
                shoot(films[-1], (shown[0], each), (original["cause"][number],
                                                    other["cause"][number]),
                      compute, config, (int(number), level), args.seed, args.num_envs)
    return films


def write_report(folder: CausesFolder, tables: Tables, films: Sequence[Path],
                 num_failures: int, what: str, controls: Sequence[FailureArm]) -> None:
    """The report."""
    said = ""
    if controls:
        far = sum(not each.near for each in controls)
        said = ("The controls have the entries of the edit's directions at other channels, and a "
                "strength with which they change as much of the layer's output on average.")
        if far:
            said += (f" At the edit's own strength {far} of {len(controls)} would change more or "
                     "less by over a quarter: they are the nearest there are.")
    with atomic_path(folder.report_file) as temporary:
        temporary.write_text(report(
            *tables, [str(film.relative_to(folder.path)) for film in films],
            folder.failures_file.name if num_failures else "", what, said))


def print_table(table: pd.DataFrame) -> None:
    """Failures of each arm that is no control, by cause."""
    for _, part in table[~table["control"]].groupby("arm", sort=False):
        some = [f"{row.cause} {100 * row.rate:.2f} %" for row in part.itertuples()
                if row.failures and row.cause != ANY]
        print(f"{part['label'].iloc[0]}: fails {part['failures'].iloc[-1]} of "
              f"{part['levels'].iloc[0]} levels" + (f": {', '.join(some)}" if some else ""))


if __name__ == "__main__":
    raise SystemExit(main())
