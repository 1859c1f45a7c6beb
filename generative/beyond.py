"""What must lie beyond the edge of the view for the agent to die, turn, or change its value?

For recorded views, a search varies the noise from which the prior generates the squares that are
not in view. The result is compared with the best of as many random worlds, reduced to the smallest
change of the most plausible world that has the effect, and checked: is this world plausible, and
does the effect persist if all other squares are generated again?

The *most plausible world* of a view is the one that the prior generates from noise of zeros.

The same command resumes a killed run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from common.cli import count, whole
from common.options import command, option
from common.progress import with_progress
from common.results import ResultStore
from generative.beyond_report import draw_view, film_view, report
from generative.beyond_results import (
    BEYOND,
    CHANGED,
    CONTROL,
    COUNTERFACTUAL,
    PLAUSIBLE,
    SEARCHED,
    stored_worlds,
    summarise,
)
from generative.recorded_views import ViewOptions
from generative.squares import SquareImages, World
from generative.start_worlds import world_seeds
from generative.surroundings import (
    AIMS,
    OCCURS,
    Candidates,
    Rollouts,
    View,
    effects,
    evolve,
    has_turned,
    joined,
    mixed,
    smallest_change,
    strength,
)

NUM_CONTROLS = 3  # random worlds of about equal plausibility, per counterfactual
_BEYOND, _RANDOM, _REDRAWN, _SEARCH = 11, 12, 13, 14  # random streams; parts of seeds


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeyondOptions(ViewOptions):
    """Search for what must lie beyond a recorded view for the agent to act differently."""

    num_evaluations: int = option(
        256, "worlds that a search evaluates for an aim, and random worlds it is compared with",
        type=whole(8, 100_000))
    num_redrawn: int = option(8, "times that all squares outside the change are generated again",
                              type=count)
    output_dir: Path = option(Path("beyond"), "folder to write to")


def search_beyond(options: BeyondOptions) -> pd.DataFrame:
    """Search beyond all views, or resume the search, and return the table of counterfactuals.

    Raises:
        UserError: see ``ViewOptions.open_views``.
    """
    views = options.open_views()
    squares = views.simulator.squares
    assert squares is not None
    store = ResultStore(options.output_dir, BEYOND)
    store.open({**views.settings, "num_evaluations": options.num_evaluations,
                "num_redrawn": options.num_redrawn}, options.overwrite)
    classes = store.compute("classes", function=lambda: {
        name: found.tolist() for name, found in views.classes().items()})
    tables = []
    for number in with_progress(range(len(views.places)), len(views.places), "view"):
        view = views.view(number, _BEYOND)
        if not store.has("counterfactuals", number):
            table, worlds, rollouts = counterfactuals(view, options, number)
            table["kinds"] = [_named(squares, classes, pairs) for pairs in table["kinds"]]
            store.write("worlds", number, value=worlds)
            store.write("rollouts", number, value=rollouts)
            store.write("counterfactuals", number, value=table.assign(
                **views.origin(number))[list(COUNTERFACTUAL)])
        tables.append(store.read("counterfactuals", number))
        if not (store.has("film", number) and store.has("picture", number)):
            stored, kinds, _ = stored_worlds(store, number)
            shown = stored[np.isin(kinds, (PLAUSIBLE, CHANGED))]
            with store.file("film", number) as path:
                film_view(path, view, shown)
            with store.file("picture", number) as path:
                draw_view(path, view, shown, tables[-1])
    table = pd.concat(tables, ignore_index=True)
    summary = summarise(table, options.seed)
    store.write("table", value=table)
    store.write("summary", value=summary)
    store.write("report", value=report(table, summary, store.settings()))
    store.finish()
    print(f"wrote {len(table)} counterfactuals of {len(views.places)} views to {store.path}; read "
          f"{store.file_of('report').name} first")
    return table


def counterfactuals(view: View, options: BeyondOptions, number: int
                    ) -> tuple[pd.DataFrame, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Search for all aims beyond one view.

    Args:
        number: number of the view, which is part of all seeds.

    Returns:
        The table with a row for each aim, in which ``kinds`` are still pairs of old and new classes
        (K, 2); and the arrays of the items ``worlds`` and ``rollouts``.
    """
    num = options.num_evaluations
    plausible = view.worlds(torch.zeros_like(view.noise(torch.zeros(1, dtype=torch.int64))))
    base = view.simulate(plausible)
    noise = view.noise(world_seeds([(options.seed, _RANDOM, number, i) for i in range(num)]))
    random = view.worlds(noise)
    at_random = view.simulate(random)
    losses, plausible_loss = view.losses(random), view.losses(plausible)[0]
    shuffled_loss = view.losses(_shuffled(random[:1], view, options.seed))[0]
    first_noise = view.noise(world_seeds([(options.seed, _SEARCH, number, i)
                                          for i in range(max(num // 4, 1))]))
    first = view.simulate(view.worlds(first_noise))
    rng = np.random.default_rng([options.seed, _SEARCH, number])
    rows, worlds, kinds = [], [plausible], [(PLAUSIBLE, "")]
    for aim in AIMS:
        def candidates(noise: Tensor, found: Rollouts, aim: str = aim) -> Candidates:
            return Candidates(noise, strength(aim, effects(aim, found, base)[0]),
                              view.seen(found.moved))

        best = evolve(lambda noise: candidates(noise, view.simulate(view.worlds(noise))),
                      candidates(first_noise, first), num, rng)
        searched = view.worlds(best.noise)
        mask, different = reduced(view, aim, plausible, searched, base)
        changed = mixed(plausible, searched, mask[None])
        found = view.simulate(changed)
        (effect,), (step,) = effects(aim, found, base)
        redrawn = view.simulate(view.worlds(view.noise(world_seeds(
            [(options.seed, _REDRAWN, number, AIMS.index(aim), i)
             for i in range(options.num_redrawn)])), changed, mask))
        (loss,) = view.losses(changed)
        near = np.argsort(abs(losses - loss), kind="stable")[:NUM_CONTROLS]
        classes = [part.squares[0].cpu().numpy()[mask] for part in (plausible, changed)]
        unlike = ~view.given.cpu().numpy()
        rows.append({
            "aim": aim, "effect": effect, "step": step,
            "turned": bool(has_turned(found, base, step)[0]), "searched": best.scores[0],
            "random": strength(aim, effects(aim, at_random, base)[0]).max(),
            "searched_percentile": _percentile(view.losses(searched)[0], losses),
            "num_different": int(different.sum()), "num_squares": int(mask.sum()),
            "kinds": np.stack(classes, axis=1),
            "distance": view.distance(mask).min() if mask.any() else np.nan,
            "percentile": _percentile(loss, losses),
            "plausible_percentile": _percentile(plausible_loss, losses),
            "shuffled_percentile": _percentile(shuffled_loss, losses),
            "nats": (loss - plausible_loss) * unlike.sum(),
            "persists": _occurs(aim, effect, redrawn, base).mean(),
            "occurs_at_random": _occurs(aim, effect, at_random, base).mean()})
        worlds += [changed, searched, random[near]]
        kinds += [(CHANGED, aim), (SEARCHED, aim), *[(CONTROL, aim)] * len(near)]
    probable = joined(worlds).as_probabilities(view.world.squares.shape[-1])
    arrays = {name: getattr(probable, field).cpu().numpy() for name, field in (
        ("world", "squares"), *((f"world_{field}", field) for field in (
            "corner", "places", "velocities", "looks", "clock", "seeds")))}
    rollouts = vars(view.simulate(joined(worlds))) | {
        f"random_{name}": array for name, array in vars(at_random).items()}
    return pd.DataFrame(rows), {**arrays, "given": view.given.cpu().numpy(),
                                **dict(zip(("kind", "aim"), np.array(kinds).T))}, rollouts


def reduced(view: View, aim: str, plausible: World, searched: World, base: Rollouts
            ) -> tuple[np.ndarray, np.ndarray]:
    """Return the squares, bool (n, n), of the smallest change, and those of the whole one; see
    ``smallest_change``. The sign of the effect does not change.

    Args:
        searched: changed world (1 row).
        base: simulation of the plausible world.
    """
    different = view.differences(searched, plausible)[0]
    if not different.any():
        return different, different
    found = view.simulate(searched)
    (size,), _ = effects(aim, found, base)

    def effect(masks: np.ndarray) -> np.ndarray:
        rollouts = view.simulate(mixed(plausible, searched, masks))
        return effects(aim, rollouts, base)[0] * np.sign(size)

    matters = view.seen(np.concatenate([found.moved, base.moved], axis=1)).any(axis=0)
    return smallest_change(effect, different, matters, abs(size)), different


def _occurs(aim: str, effect: float, found: Rollouts, base: Rollouts) -> np.ndarray:
    """Return whether an effect occurs in worlds: same sign, and at least OCCURS of its size."""
    return effects(aim, found, base)[0] * np.sign(effect) >= OCCURS * abs(effect)


def _percentile(loss: float, losses: np.ndarray) -> float:
    """Return the percentage of random worlds (N,) that are less plausible; ties count half."""
    return 100 * float(((losses > loss) + 0.5 * (losses == loss)).mean())


def _shuffled(world: World, view: View, seed: int) -> World:
    """Shuffle the squares beyond the view of a world (1 row)."""
    places = torch.from_numpy(np.random.default_rng(seed).permutation(int((~view.given).sum())))
    squares = world.squares.clone()
    squares[:, ~view.given] = squares[:, ~view.given][:, places.to(squares.device)]
    return dataclasses.replace(world, squares=squares)


def _named(squares: SquareImages, classes: dict[str, list[int]], pairs: np.ndarray) -> str:
    """Return the kinds of changed squares, such as "2 empty to lava, 1 wall to empty".

    Args:
        classes: numbers of the classes by name of the kind.
        pairs: class in the plausible and in the changed world (K, 2).
    """
    names, sprites = {squares.empty_class: "empty"}, squares.sprites
    for kind, numbers in classes.items():
        for number in numbers:
            names[number] = f"{names[number]} or {kind}" if number in names else kind

    def named(number: int) -> str:
        is_solid = sprites is not None and bool(sprites.solid[number])
        return names.get(number, "wall" if is_solid else "other")

    found = Counter(f"{named(old)} to {named(new)}" for old, new in pairs.tolist())
    return ", ".join(f"{number} {change}" for change, number in found.most_common()) or "none"


main = command(BeyondOptions, search_beyond)

if __name__ == "__main__":
    raise SystemExit(main())
