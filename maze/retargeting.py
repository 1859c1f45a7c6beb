"""Retargeting: set a cell of channels that follow the cheese, and see whether the mouse goes there.

The cheese is taken away, and every free square of each level is a target of its own. Controls set
other channels at the same cell, and the same channels at other cells. Each run adds an arm to the
folder; a killed one goes on after its last level.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable

import numpy as np
import pandas as pd

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from common.cli import Parser, set_up_logging, whole
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import versions
from common.progress import with_progress
from common.results import ResultStore
from interventions.controls import CHANNELS, controls_of
from interventions.flags import REFERENCE_SIZE
from interventions.partial_forward import PartialForward
from interventions.patches import SetTo
from maze.field.fields import reference_frames
from maze.level.flags import add_agent_flags, add_output_flags, levels_of
from maze.level.state import game_of
from maze.studies.channel_sets import (
    add_channel_flags,
    channels_asked,
    map_layer,
    write_nothing_chosen,
)
from maze.studies.results import RETARGETING_FILES
from maze.studies.retarget_report import by_part, effects, plot, report
from maze.studies.retargets import (
    MOVED_CHEESE,
    Retargeted,
    Setting,
    targets_of,
)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to look at", num_mazes=100)
    add_channel_flags(flags)
    flags.add_argument("--value", type=float, default=5.5,
                       help="that the target's cell of the channels is set to")
    flags.add_argument("--others", type=float,
                       help="that the channels' other cells are set to, such as -0.2; kept if not "
                            "given")
    flags.add_argument("--targets", default="all", type=_targets, metavar="all / N",
                       help="squares of a level that are targets: all free ones, or some at random")
    flags.add_argument("--move_cheese", action="store_true",
                       help="add an arm with the cheese itself at the target")
    flags.add_argument("--num_controls", type=whole(0, 1000), default=19,
                       help="controls of each kind; with 0 there are no tests")
    flags.add_argument("--control_targets", type=whole(1, 1000), default=2,
                       help="targets of a level at which controls are tried")
    add_output_flags(flags, "retargeting")
    return flags


def _targets(text: str) -> int | None:
    return None if text == "all" else whole(1, 10**6)(text)


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    if not np.isfinite([args.value, args.others or 0]).all():
        raise UserError("--value and --others must be finite numbers")
    compute = resolve_compute(args.device, args.gpu_device, args.precision)
    policy = load_agent(args.agent_file, compute.device)
    layer = map_layer(policy, args.layer)
    channels = channels_asked(args.channels, args.strongest, policy, layer)
    states = levels_of(args)
    env, seeds = game_of(states), [state.level_seed for state in states]
    if len(set(seeds)) < len(seeds):
        raise UserError("two of the levels have the same seed; ask for one of them at a time")
    others = "" if args.others is None else f"_others_{args.others:g}"
    setting = Setting(channels, (args.value,) * len(channels), args.others)
    number = "" if args.num_controls == 19 else f"_controls_{args.num_controls}"
    arm = f"{'_'.join(map(str, channels))}_to_{args.value:g}{others}{number}"
    if len(arm) > 100:
        digest = hashlib.sha256(arm.encode()).hexdigest()[:8]
        arm = f"{len(channels)}_channels_{digest}_to_{args.value:g}{others}{number}"
    if args.dry_run:
        print(f"arm {arm}; levels: {' '.join(map(str, seeds))}")
        return
    store = ResultStore(args.output_dir, RETARGETING_FILES)
    store.open({
        "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
        "layer": layer.name, "levels": seeds, "levels_sha256": hashlib.sha256(json.dumps(
            [state.grid.to_rows() for state in states]).encode()).hexdigest(),
        "distribution_mode": env.distribution_mode, "use_backgrounds": env.use_backgrounds,
        "targets": args.targets, "control_targets": args.control_targets, "seed": args.seed,
        "precision": compute.precision, "versions": versions()}, args.overwrite)
    if not channels:
        write_nothing_chosen(store, layer)
        return
    controls = []
    if args.num_controls:
        reference = reference_frames(env, set(seeds), REFERENCE_SIZE, args.seed)
        patch = SetTo(layer.name, channels=channels, cells=((0, 0),), value=args.value)
        drawn = controls_of(policy, [patch], args.num_controls, args.seed, reference, CHANNELS)
        for [control] in (each.patches for each in drawn):
            chosen = list(control.channels)
            controls.append(Setting(control.channels, tuple(
                np.asarray(control.value)[chosen, 0, 0].tolist()), args.others))
    cut = PartialForward(policy, compute, layer.name)
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in (
        arm, *([MOVED_CHEESE] if args.move_cheese else []))}
    tried = []
    for state in with_progress(states, len(states), "level"):
        make = functools.cache(functools.partial(Retargeted, cut, layer, state))
        rng = np.random.default_rng([args.seed, state.level_seed])
        targets = targets_of(state.with_cheese(None).grid, args.targets, rng)
        some = [targets[place] for place in np.sort(
            rng.permutation(len(targets))[:args.control_targets])]
        for each, parts in tables.items():
            compute_one = functools.partial(_table, make, targets,
                                            setting if each == arm else None)
            parts.append(store.compute("levels", each, state.level_seed, function=compute_one))
        if controls:
            compute_one = functools.partial(_controls, make, some, setting, controls, rng)
            tried.append(store.compute("controls", arm, state.level_seed, function=compute_one))
    for each, parts in tables.items():
        table = pd.concat(parts, ignore_index=True)
        found = by_part(table, args.seed)
        tested = (effects(table, pd.concat(tried, ignore_index=True), args.seed)
                  if controls and each == arm else pd.DataFrame())
        store.write("parts", each, value=found)
        if len(tested):
            store.write("effects", each, value=tested)
        store.write("report", each, value=report(each, layer.name, table, found, tested))
        with store.file("figure", each) as temporary:
            plot(temporary, each, found)
        store.write("targets", each, value=table)
        print(f"{each}: {len(table)} targets of {len(states)} levels, path probability "
              f"{table['path_unpatched'].mean():.3f} unpatched and "
              f"{table['path_patched'].mean():.3f} patched, exact probability "
              f"{table['exact_unpatched'].mean():.3f} and {table['exact_patched'].mean():.3f}")
    print(f"wrote {', '.join(str(store.file_of('targets', each)) for each in tables)}")


def _table(make: Callable[[], Retargeted], *args) -> pd.DataFrame:
    return make().table(*args)


def _controls(make: Callable[[], Retargeted], *args) -> pd.DataFrame:
    return make().controls(*args)


if __name__ == "__main__":
    raise SystemExit(main())
