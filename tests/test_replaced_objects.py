"""Objects that are replaced by what the prior generates, in the simulator and in the real game."""

import numpy as np
import pandas as pd
import pytest
from conftest import SHIPPED

from envs.objects import moving_objects
from generative import replaced_objects
from generative.replaced_objects import Replacements, summarise
from generative.surroundings import DEATH, TURN, VALUE, Rollouts


def arguments(recording, folder, *more):
    return [*map(str, (
        *SHIPPED, "--data_dir", recording.path, "--output_dir",
        folder, "--num_views", 4, "--num_steps", 6, "--precision", "float32", "--device", "cpu",
        "--unseen", *more))]


@pytest.mark.slow
def test_an_object_is_replaced_and_the_rest_of_the_level_stays(hard_recording, tmp_path,
                                                               monkeypatch):
    played, states = [], {}

    def watched(self, view, number, worlds):
        found, frames = real(self, view, number, worlds)
        built = [self.rebuilder.build(world, states[self.views.places[number].episode]).state
                 for world in worlds]
        played.append((worlds, built, found))
        return found, frames

    def remembered(folder, episode, rows):
        found = list(level_states(folder, episode, rows))
        states[episode] = found[0][1]
        return found

    real, level_states = Replacements._played, replaced_objects.level_states
    monkeypatch.setattr(Replacements, "_played", watched)
    monkeypatch.setattr(replaced_objects, "level_states", remembered)
    assert replaced_objects.main(arguments(hard_recording, tmp_path / "study")) == 0
    table = pd.read_csv(tmp_path / "study" / "replaced.csv")
    assert table["control"].notna().any()
    assert len(played) == table["view"].nunique() >= 2
    assert (table["rebuilt"] == 1).all()
    values = table[table["aim"] == VALUE]
    assert (values["at_once"].abs() <= values["effect"].abs() * 1.01).all()  # the largest one
    assert (values["at_once"] != 0).any()
    for (worlds, built, found), (_, rows) in zip(played, table.groupby("view")):
        unchanged, changed = (world.squares[0].numpy() for world in worlds[:2])
        differs = unchanged != changed
        kind, size = rows[["kind", "num_squares"]].iloc[0]
        assert 1 <= differs.sum() <= size
        cells = [state.grid for state in built[:2]]
        things = [{(thing.kind, thing.x, thing.y) for thing in moving_objects(state)}
                  for state in built[:2]]
        entities = [len(state.entities) for state in built[:2]]
        changes = (cells[0] != cells[1]).sum() + len(things[0] ^ things[1])
        assert 1 <= changes + abs(entities[0] - entities[1]) <= 2 * size + 2, kind
        for control in worlds[2:]:
            other = control.squares[0].numpy() != unchanged
            assert other.any() and not (other & differs).any()
        assert isinstance(found[-1], Rollouts)  # the recorded level
    effects = table[replaced_objects.is_effect(table)]
    films = sorted((tmp_path / "study" / "films").glob("*.mp4"))
    assert [int(path.stem[-5:]) for path in films] == sorted(effects["view"].unique())
    # A killed run goes on with the views that are left.
    [(tmp_path / "study" / "views" / f"{number:05}.csv").unlink() for number in (0, 3)]
    calls = len(played)
    assert replaced_objects.main(arguments(hard_recording, tmp_path / "study")) == 0
    assert len(played) - calls <= 2
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "study" / "replaced.csv"), table)


def test_only_effects_that_are_large_enough_count_and_failures_do_not_occur():
    row = {"view": 0, "level_seed": 0, "aim": VALUE, "effect": 2.0, "real": 1.5, "rebuilt": 1.0,
           "occurs": 1.0, "control": 0.5, "rebuilding": -3.0, "at_once": 0.0}
    table = pd.DataFrame([
        row, {**row, "level_seed": 1, "rebuilt": 0.0, "real": np.nan, "occurs": 0.0,
              "control": 0.0, "rebuilding": 4.0},
        {**row, "level_seed": 2, "effect": 0.4}, {**row, "level_seed": 3, "aim": TURN,
                                                  "effect": -0.2},
        {**row, "level_seed": 4, "aim": DEATH, "effect": -0.04}])
    found = summarise(table, 0).set_index(["aim", "quantity"])
    assert found.loc[(VALUE, "occurs"), "mean"] == 0.5
    assert found.loc[(VALUE, "occurs"), "counterfactuals"] == 2
    assert found.loc[(VALUE, "difference"), "mean"] == 0.25
    assert found.loc[(VALUE, "by_rebuilding"), "mean"] == 0.5
    assert found.loc[("all", "occurs"), "counterfactuals"] == 3
    assert found.loc[(TURN, "size"), "mean"] == pytest.approx(0.2)
    assert replaced_objects.headline(found.reset_index()).startswith(
        "Of 3 effects in 3 levels, 67 (")
    assert "too few" in replaced_objects.headline(found.reset_index())
    assert DEATH not in found.index.get_level_values("aim")
    # Without a control filling, an effect says nothing about the difference.
    missing = summarise(table.assign(control=[np.nan, 0.5, 0.5, 0.5, 0.5]), 0).set_index(
        ["aim", "quantity"])
    assert missing.loc[(VALUE, "occurs"), "counterfactuals"] == 2
    assert missing.loc[(VALUE, "difference"), "counterfactuals"] == 1
    assert missing.loc[(VALUE, "difference"), "mean"] == -0.5
    none = summarise(table.assign(control=np.nan), 0)
    assert "control" not in set(none["quantity"]) and "random" not in replaced_objects.headline(
        none)


def test_rank_correlations_are_over_all_replacements_and_tell_the_agent_alone():
    rng = np.random.default_rng(0)
    real = rng.normal(size=40)
    table = pd.DataFrame({
        "level_seed": range(40), "aim": VALUE, "effect": 0.01 * real,
        "at_once": rng.normal(size=40), "real": real, "rebuilt": 1.0, "occurs": 1.0,
        "control": 0.0, "rebuilding": 0.0})
    found = summarise(table, 0).set_index("quantity")
    assert found.loc["effect", "mean"] == pytest.approx(1)
    assert abs(found.loc["at_once", "mean"]) < 0.4 and "occurs" not in found.index
