"""python -m generative.dream_page in a real browser: steps equal PyTorch's, and the page plays."""

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, SHIPPED, SHIPPED_AGENT, SHIPPED_SIMULATOR, refusal
from page_exports import needs_browser
from page_view import fragment_of, go, pixels

from agents.agent_file import load_agent
from agents.frames import to_frames
from agents.provenance import agent_sha256
from common.results import ResultStore
from common.traced import trace
from generative import dream_page as script
from generative import optimise_start
from generative.dataset import RolloutDataset
from generative.dream_page import DreamPageOptions, build_page
from generative.dream_page_files import DreamPageFolder
from generative.dream_starts import (
    optimised_page_starts,
    recorded_page_starts,
    sampled_page_starts,
)
from generative.filling import fill, filled_start
from generative.imagining import load_simulator
from generative.networks import LatentSampler
from generative.prior import Prior, _motion, _parts, camera_globals
from generative.sample_files import SampleFolder
from generative.spatial import split_state
from interventions.direction_folders import PROBE_ATLAS, SPARSE_FEATURES
from pipeline.patterns import find
from pipeline.presets import load_preset
from pipeline.stage_files import all_stages
from tools.browser import SHOWN, opened_page

pytestmark = needs_browser
MODE = LatentSampler("mode")
MOST_BYTES = 22e6
STEPS = 16
ACTIONS = [7, 7, 8, 8, 7, 1, 1, 2, 5, 8, 8, 7, 7, 7, 7, 7]
CLOSE = {"rtol": 0, "atol": 1e-3}

# Steps of the page's engine from a start, without the page's state.
PLAY = """async ([actions, noise, onlyMoves, hole]) => {
    const { engine, loaded, manifest } = dream
    const { arrays, past } = loaded
    let world = loaded.world
    const given = noise && Object.fromEntries(Object.entries(noise).map(
        ([name, numbers]) => [name, Float32Array.from(numbers)]))
    if (noise && !hole) {
        world = await engine.run('another', {
            number: world, known: arrays.known, h: arrays.h, seed: 77, noise: given })
    }
    let before = { h: arrays.h, hidden: arrays.hidden, world }
    const found = []
    for (let step = 0; step <= actions.length; step++) {
        const taken = manifest.actions.map((_, i) => Number(i === actions[step - 1]))
        before = await engine.run('step', { h: before.h, hidden: before.hidden,
            world: before.world, action: step ? taken : arrays.action, step, edits: [],
            holes: hole && !step ? [{ squares: hole, seed: 77, noise: given }] : null, past })
        if (onlyMoves) found.push(before.world !== world)
        else found.push({ image: Array.from(before.frame), logProbs: Array.from(before.logProbs),
            value: before.value, reward: before.reward, end: before.end })
    }
    return found
}"""


@pytest.fixture(scope="module")
def directions(tmp_path_factory):
    """Folders of three sparse features, the first two of which are ablated and the first of which
    has a name, and of two probes; and the directions of the page, strongest feature first."""
    folder, rng = tmp_path_factory.mktemp("directions"), np.random.default_rng(0)
    size = load_agent(SHIPPED_AGENT).hidden_state_size
    atoms = rng.normal(size=(3, size)).astype(np.float32)
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    weights = {name: rng.normal(size=size) for name in ("saw_ahead", "velocity_y", "coin_in_view")}
    settings = {"agent_sha256": agent_sha256(SHIPPED_AGENT), "recording_sha256": None}
    features, atlas = (ResultStore(folder / name, schema) for name, schema in (
        ("features", SPARSE_FEATURES), ("atlas", PROBE_ATLAS)))
    features.open(settings)
    features.write("sae", value={"atoms": atoms, "centre": np.zeros(size), "num_active": 2,
                                 "encoder": atoms[::-1], "bias": np.zeros(3), "signed": False})
    features.write("features", value=pd.DataFrame({
        **dict.fromkeys(("frequency", "mean_activation", "low_95", "high_95", "p", "p_holm", "base",
                         "precision", "kl"), 0.5),
        "dictionary": "sae_3", "feature": [0, 1, 2], "label": ["saw_in_view", "wall", "wall"],
        "auc": [0.2, 0.6, 0.5], "named": [True, False, False], "named_shuffled": False,
        "rank": [2, 1, np.nan]}))
    atlas.open(settings)
    for name, vector in weights.items():
        atlas.write("weights", name, value={"weights": vector, **dict.fromkeys(
            ("train", "penalty", "test"), np.arange(2))})
    return folder, {"saw ahead": weights["saw_ahead"], "velocity y": weights["velocity_y"],
                    "feature 1": atoms[1], "feature 0: not saw in view": atoms[0]}


@pytest.fixture(scope="module")
def optimised(hard_recording, tmp_path_factory):
    """Files of a small search for two objectives that the pipeline lets the page read."""
    stages = all_stages(load_preset("demo"), "demo")
    (patterns,) = (stage.needs["optimise_start"] for stage in stages if stage.name == "dream_page")
    output, readable = (tmp_path_factory.mktemp(name) for name in ("output", "readable"))
    folder = output / "samples" / "made_to_order"
    assert optimise_start.main([*map(str, (
        *SHIPPED, "--interpreting_params_name", "demo", "--data_dir", hard_recording.path,
        "--targets", "value", "log_prob_up", "--num_starts", 2, "--iterations", 1,
        "--num_recorded", 8, "--step", 1, "--num_sim_steps", 2, "--no_real_game",
        "--no_videos", "--device", "cpu", "--output_dir", folder))]) == 0
    for path in find(output, patterns):
        copy = readable / path.relative_to(output)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return readable / "samples" / "made_to_order"


@pytest.fixture(scope="module")
def options(hard_recording, directions, optimised, tmp_path_factory):
    return DreamPageOptions(
        agent_file=SHIPPED_AGENT, model_file=SHIPPED_SIMULATOR, data_dir=hard_recording.path,
        num_recorded=4, num_sampled=2, features_dir=directions[0] / "features",
        atlas_dir=directions[0] / "atlas", optimised_dir=optimised,
        output_dir=tmp_path_factory.mktemp("dream") / "page")


@pytest.fixture(scope="module")
def exported(options):
    return build_page(options)


@pytest.fixture(scope="module")
def simulator():
    return load_simulator(SHIPPED_SIMULATOR, SHIPPED_AGENT)


@pytest.fixture(scope="module")
def starts(simulator, hard_recording, optimised):
    dataset = RolloutDataset(hard_recording.path, 3, 1)
    return [*recorded_page_starts(simulator, dataset, 4, 60, 0),
            *optimised_page_starts(simulator, optimised, 20, SHIPPED_AGENT, SHIPPED_SIMULATOR),
            *sampled_page_starts(simulator, 2, 0)]


@pytest.fixture(scope="module")
def page(browser, exported):
    with opened_page(browser, exported.as_uri(), viewport={"width": 1440, "height": 900},
                     color_scheme="light") as page:
        page.set_default_timeout(60_000)  # milliseconds
        yield page


def show(page, fragment):
    """Show another view, and wait until its steps are taken."""
    go(page, fragment)
    page.wait_for_function("() => !dream.working && dream.record")


def noise_for_page(noise):
    """Return noise of ``Prior.place_noise`` as the page draws it."""
    squares, places, looks = _parts(noise)
    given = {"squares": squares, "looks": looks.float(), **_motion(places, looks)}
    return {name: tensor.flatten().tolist() for name, tensor in given.items()}


@torch.no_grad()
def expected(simulator, start, actions):
    first = int(start.action.argmax())
    return simulator.imagine(start, MODE, len(actions) + 1, true_actions=torch.tensor(
        [[first], *([action] for action in actions)]))


def assert_same(found, steps):
    for ours, step in zip(found, steps, strict=True):
        np.testing.assert_allclose(ours["image"], step.images[0].flatten(), **CLOSE)
        np.testing.assert_allclose(ours["logProbs"], step.log_probs[0], **CLOSE)
        for name, tensor in (("value", step.values), ("reward", step.rewards)):
            np.testing.assert_allclose(ours[name], tensor.item(), **CLOSE)
        assert abs(ours["end"] - torch.sigmoid(step.terminal_logits).item()) < 1e-3


@pytest.mark.parametrize("number", [0, 4, 6])
def test_steps_equal_those_of_pytorch(page, simulator, starts, number):
    """From a recorded start, an optimised and a sampled one; reds if an operation is traced
    wrongly."""
    show(page, f"start={number + 1}&mode=you")
    found = page.evaluate(PLAY, [ACTIONS, None])
    assert_same(found, expected(simulator, starts[number].start, ACTIONS))


def test_worlds_sampled_in_the_page_equal_those_of_pytorch(page, simulator, starts):
    """With the same noise; the view at the start is kept, what lies beyond changes, and the world
    moves on when its edge comes near the view."""
    show(page, "start=1&mode=you")
    start, seeds = starts[0].start, torch.tensor([77])
    known = torch.from_numpy(starts[0].known)[None]
    noise = simulator.prior.place_noise(seeds)
    with torch.no_grad():
        other = simulator.prior.completed(
            dataclasses.replace(start.world, seeds=seeds), known,
            camera_globals(split_state(start.env_h, simulator.config).camera), noise)
    steps = expected(simulator, dataclasses.replace(start, world=other), ACTIONS)
    found = page.evaluate(PLAY, [ACTIONS, noise_for_page(noise)])
    assert_same(found, steps)
    old = expected(simulator, start, [])[0]
    np.testing.assert_allclose(found[0]["image"], old.images[0].flatten(), atol=0.05)
    assert not torch.equal(other.squares.argmax(dim=-1), start.world.squares.argmax(dim=-1))


def test_holes_filled_in_the_page_equal_those_of_pytorch(page, simulator, starts):
    """With the same noise. Reds if the encoder compares frames without its mask of the player."""
    show(page, "start=1&mode=you")
    start, seeds = starts[0].start, torch.tensor([77])
    images = torch.from_numpy(starts[0].frames)[:, None].float() / 255
    squares = [(right, down) for down in range(18, 25) for right in range(18, 26)]
    hole = torch.zeros(1, *starts[0].known.shape, dtype=torch.bool)
    hole[0, [down for _, down in squares], [right for right, _ in squares]] = True
    noise = simulator.prior.place_noise(seeds)
    with torch.no_grad():
        vectors = simulator.encode(images)
        mixed, world = fill(simulator, images, vectors, start.world, hole, seeds)
        filled = filled_start(simulator, mixed, world, vectors)
    filled = dataclasses.replace(filled, agent_hidden=start.agent_hidden, action=start.action)
    found = page.evaluate(PLAY, [ACTIONS[:4], noise_for_page(noise), False, squares])
    assert_same(found, expected(simulator, filled, ACTIONS[:4]))
    assert not torch.equal(world.squares.argmax(dim=-1), start.world.squares.argmax(dim=-1))


def test_a_dream_starts_again_where_it_is(page):
    """With no square painted. Reds if moving objects or the camera are where they were at first."""
    show(page, "start=4&mode=likely&actions=HHHHHH&step=6")
    frames = page.evaluate("""async () => {
        const before = Array.from(dream.record.frame)
        await dream.edit([], [{ squares: [], seed: null, from: 6 }])
        return [before, Array.from(dream.record.frame)] }""")
    assert abs(np.subtract(*frames)).max() < 0.3


def test_erased_squares_change_the_value(page):
    """Reds if the agent sees the old frame, or the dream without the change is painted, too."""
    show(page, "start=8&mode=likely&actions=HH&step=2")
    was = page.evaluate("dream.record.value")
    page.keyboard.press("e")
    frame = page.get_by_label("frame of the dream at step 2").bounding_box()
    for height in (0.6, 0.67, 0.74):
        for button, right in ((page.mouse.down, 0.6), (page.mouse.up, 0.9)):
            page.mouse.move(frame["x"] + right * frame["width"],
                            frame["y"] + height * frame["height"], steps=9)
            button()
    count = page.evaluate("dream.marks.length")
    for key in ("ArrowUp", "Space", "Space", "Delete"):  # the square is marked already
        page.keyboard.press(key)
    page.wait_for_function("() => dream.plain && !dream.working")
    value, plain = page.evaluate("[dream.record.value, dream.plainRecord.value]")
    assert abs(value - was) > 0.05 > abs(plain - was)
    assert page.evaluate("dream.dream.steps[1].value === dream.plain.steps[1].value")
    page.get_by_role("button", name=f"remove: {count} squares emptied at step 2").click()
    page.wait_for_function("() => !dream.plain && !dream.working")
    assert page.evaluate("dream.record.value") == pytest.approx(was, abs=1e-5)
    page.keyboard.press("Escape")


def test_a_world_moves_on_like_that_of_pytorch(page, simulator, starts, monkeypatch):
    """Long walks leave the first world; the page's noise is given to PyTorch."""
    for number, action in itertools.product((4, 5, 6, 7, 0, 1, 2, 3), (8, 1)):
        show(page, f"start={number + 1}&mode=you")
        moves = page.evaluate(PLAY, [[action] * 50, None, True])
        if any(moves):
            break
    actions = [action] * (moves.index(True) + 2)
    found = page.evaluate(PLAY, [actions, None])
    noise = {}

    def place_noise(self, seeds, origin=None):
        key = tuple(origin[0].tolist())
        noise.setdefault(key, page.evaluate("(origin) => dream.noise(origin)", list(key)))
        fields = noise[key]
        size = self.worlds.num_squares
        self.fields = {name: torch.tensor(fields[name]).view(1, size, size)
                       for name in ("places", "velocities", "looks")}
        return torch.cat([torch.tensor(fields["squares"]).view(1, -1, size, size),
                          torch.zeros(1, 2, size, size)], dim=1)

    monkeypatch.setattr(Prior, "place_noise", place_noise)
    monkeypatch.setattr("generative.prior._parts", lambda noise: (
        noise[:, :-2], simulator.prior.fields["places"], simulator.prior.fields["looks"].long()))
    monkeypatch.setattr("generative.prior._motion", lambda places, looks: {
        name: simulator.prior.fields[name] for name in ("places", "velocities")})
    assert_same(found, expected(simulator, starts[number].start, actions))
    assert noise


@pytest.mark.slow
def test_the_page_is_small_and_fast(page, options, all_steps, tmp_path):
    """Sizes and times that the page promises. Processor time of the browser is compared, because
    other processes also use the machine."""
    file = build_page(dataclasses.replace(options, output_dir=tmp_path / "page"))
    sizes = {path: path.stat().st_size for path in file.parent.rglob("*") if path.is_file()}
    per_start = np.mean([size for path, size in sizes.items() if path.stem.startswith("start_")])
    assert sum(sizes.values()) + 92 * per_start < MOST_BYTES  # with 100 starts instead of 8
    page.goto(file.as_uri())
    page.wait_for_selector(SHOWN)
    show(page, "start=2&mode=you")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds(task):
        def used():
            metrics = session.send("Performance.getMetrics")["metrics"]
            return {entry["name"]: entry["value"] for entry in metrics}["ProcessTime"]
        before = used()
        page.evaluate(task)
        return used() - before

    steps = """async () => { for (let i = 0; i < 24; i++) {
        await dream.act(7)
        await new Promise(requestAnimationFrame)
    } }"""
    assert seconds(steps) / 24 < 1 / 12
    page.evaluate("dream.another()")
    assert seconds("dream.another()") < 1.5
    assert seconds("dream.edit([], [{ squares: [[20, 20]], seed: 1, from: 0 }])") < 1.5


def test_the_agent_and_the_person_act(page, starts):
    show(page, "start=7&mode=likely")
    first = pixels(page.get_by_label("frame of the dream"))
    page.keyboard.press(".")
    page.wait_for_function("() => dream.view.step === 1 && !dream.working")
    likely = page.evaluate("dream.likely(dream.dream.steps[0])")
    assert page.evaluate("[dream.record.action, dream.record.own]") == [likely, False]
    page.get_by_role("combobox", name="speed").select_option("24 steps/s")  # must not keep the keys
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => dream.view.step === 2 && !dream.working")
    page.keyboard.press("9")
    page.wait_for_function("() => dream.view.step === 3 && !dream.working")
    page.get_by_role("button", name="down, ").click()
    page.wait_for_function("() => dream.view.step === 4 && !dream.working")
    acted = page.evaluate("dream.dream.steps.map(({ action, own }) => [action, own])")
    assert acted[2:] == [[1, True], [8, True], [3, True]]
    assert (pixels(page.get_by_label("frame of the dream")) != first).any()
    for _ in range(3):
        page.keyboard.press(",")
    page.keyboard.press("5")  # drops what came after step 1
    page.wait_for_function("() => dream.length === 3 && !dream.working")
    page.keyboard.press("m")
    page.keyboard.press(" ")
    page.wait_for_function("() => dream.length > 6")
    page.keyboard.press(" ")
    page.wait_for_function("() => !dream.working && !dream.playing")
    assert page.evaluate("dream.dream.steps.slice(3).some(({ own }) => own)") is False
    # The controls of the page stay when another start is opened: rebuilding them lost the focus.
    page.get_by_role("button", name="up, ").focus()
    page.keyboard.press("]")
    page.wait_for_function("() => dream.view.start === 7 && !dream.working")
    assert page.evaluate("document.activeElement.ariaLabel").startswith("up, ")


def test_an_address_holds_the_whole_dream(page, browser, exported):
    show(page, "start=2&mode=you&world=3&actions=HHhIb&step=4&edit=1_add_2_3_&paint=2_1_21.20_22.20"
               "&notes=a%26b")
    keep = """() => dream.dream.steps.map(
        ({ action, own, value, end }) => [action, own, value, end])"""
    was = page.evaluate(keep)
    assert [action for action, *_ in was[1:]] == [7, 7, 7, 8, 1]
    assert [own for _, own, *_ in was[1:]] == [True, True, False, True, False]
    fragment = fragment_of(page)
    assert fragment["actions"] == ["HHhIb"] and fragment["edit"] == ["1_add_2_3_"]
    assert fragment["paint"] == ["2_1_21.20_22.20"]
    with opened_page(browser, page.url) as other:
        other.wait_for_function("() => dream.length === 6 && !dream.working")
        np.testing.assert_array_equal(np.array(other.evaluate(keep), float), np.array(was, float))
        assert other.evaluate("dream.view.step") == 4
        assert other.get_by_role("textbox", name="Notes").input_value() == "a&b"
    show(page, "start=99&mode=x&actions=%3Cb%3E&edit=0_add_1_1_&paint=1_2_x&step=-1")
    # Nothing of it fits.
    assert page.evaluate("[dream.view.start, dream.length, dream.edits.length, dream.paints.length]"
                         ) == [0, 1, 0, 0]


def test_a_change_of_the_hidden_state_acts_and_can_be_removed(page, simulator, starts):
    """Held along the direction that raises the value; the dream without it stays as it was."""
    show(page, "start=1&mode=likely&actions=hh&step=2")
    was = page.evaluate("dream.record.value")
    page.get_by_role("slider", name="change: raises the value").fill("-3")
    page.wait_for_function("() => dream.plain && !dream.working")
    values = page.evaluate("[dream.record.value, dream.plainRecord.value]")
    axis = page.evaluate("dream.manifest.axes[0]")
    head = simulator.agent.policy.fc_value
    vector = torch.tensor(axis["vector"])
    steps = expected(simulator, starts[0].start, [7, 7])
    hidden = steps[2].hidden_states[0]
    held = hidden + (axis["mean"] - 3 * axis["sd"] - hidden @ vector) * vector
    np.testing.assert_allclose(values, [head(held).item(), was], atol=1e-3)
    page.keyboard.press(".")
    page.wait_for_function("() => dream.plain.steps.length === 4 && !dream.working")
    page.get_by_role("button", name="Remove all changes").click()
    page.wait_for_function("() => !dream.plain && !dream.working")
    page.keyboard.press("Home")
    assert page.evaluate("dream.dream.steps[2].value") == pytest.approx(was, abs=1e-5)


def test_sliders_follow_probes_and_sparse_features(page, directions):
    """Reds if the page takes the encoder, a feature without an effect, or another label."""
    axes = [axis for axis in page.evaluate("dream.manifest.axes")
            if axis["kind"] in ("probe", "feature")]
    assert [axis["name"] for axis in axes] == list(directions[1])
    for axis, vector in zip(axes, directions[1].values()):
        np.testing.assert_allclose(axis["vector"], vector / np.linalg.norm(vector), atol=1e-6)
    show(page, "start=1&mode=you")
    before = page.evaluate("Array.from(dream.record.hidden)")
    page.get_by_role("combobox", name="The slider").select_option("add")
    page.get_by_role("list", name="Sparse features").get_by_role("slider").nth(1).fill("2")
    page.wait_for_function("() => dream.plain && !dream.working")
    moved = np.array(page.evaluate("Array.from(dream.record.hidden)")) - before
    vector = directions[1]["feature 0: not saw in view"]
    np.testing.assert_allclose(moved, 2 * axes[-1]["sd"] * vector, atol=1e-4)
    page.get_by_role("combobox", name="The slider").select_option("hold")
    page.get_by_role("button", name="Remove all changes").click()
    page.wait_for_function("() => !dream.plain && !dream.working")


def test_optimised_starts_are_the_best_of_their_objectives(page, optimised, starts, simulator):
    """Reds if another start of the objective is taken, or its world is lost."""
    table = pd.read_csv(optimised / "starts.csv")
    table = table[table["best"] & (table["penalty"] == 1)]
    best = table.sort_values("order")["sample"].tolist()
    frames = SampleFolder(optimised / "penalty_1").stacked_field("frames", best)
    for start, sample in zip(starts[4:6], frames, strict=True):
        with torch.no_grad():
            steps = simulator.imagine(start.start, MODE, len(sample))
        shown = to_frames(torch.cat([step.images for step in steps])).astype(int)
        assert abs(shown - sample).max() <= 1
    show(page, "start=6&mode=you")
    assert page.get_by_text("Now start 6: optimised to maximise the log-probability of up at step 1"
                            ).is_visible()
    group = page.get_by_role("group", name="Optimised starts")
    assert group.get_by_role("button").count() == 2


def test_directions_and_starts_of_other_agents_are_refused(directions, optimised, tmp_path, capsys):
    agent, model = (ROOT / "pretrained" / name for name in (
        "maze_confined/model.pth", "maze_confined_simulator/model.pt"))
    argv = ["--agent_file", str(agent), "--model_file", str(model), "--output_dir",
            str(tmp_path / "page")]
    for flag, folder in (("--features_dir", directions[0] / "features"),
                         ("--atlas_dir", directions[0] / "atlas"), ("--optimised_dir", optimised)):
        sentence = refusal(script.main, [*argv, flag, str(folder)], capsys)
        assert "with an agent other than" in sentence


def test_saliency_is_the_change_when_a_cell_is_blurred(page, simulator, starts):
    show(page, "start=1&mode=you")
    page.get_by_role("button", name="for the value").click()
    page.wait_for_function("() => dream.saliency && !dream.working")
    found = page.evaluate("""() => ({
        side: dream.saliency.side, value: Array.from(dream.saliency.value) })""")
    step = expected(simulator, starts[0].start, [])[0]
    blurred = step.images
    for _ in range(12):
        blurred = torch.nn.functional.avg_pool2d(blurred, 3, 1, 1, count_include_pad=False)
    for cell in (0, 7 * found["side"] + 7):
        top, left = (4 * part for part in divmod(cell, found["side"]))
        changed = step.images.clone()
        area = (..., slice(top, top + 8), slice(left, left + 8))
        changed[area] = blurred[area]
        with torch.no_grad():
            value = simulator.agent.step(changed, starts[0].start.agent_hidden).values.item()
        assert found["value"][cell] == pytest.approx(step.values.item() - value, abs=1e-3)


def test_narrow_pages_do_not_scroll_sideways(page):
    show(page, "start=1&actions=hh&edit=1_add_2_0_")
    page.wait_for_function("() => dream.plain && !dream.working")
    size = page.viewport_size
    for width in (420, 1024):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size(size)


def test_a_maze_is_dreamed_too(browser, tmp_path):
    """A static camera: no squares lie beyond the view, and the agent has no memory. Reds if the
    scale of the sliders comes from states that enter the agent, which it does not use."""
    agent, model = (ROOT / "pretrained" / name for name in (
        "maze_confined/model.pth", "maze_confined_simulator/model.pt"))
    file = build_page(DreamPageOptions(agent_file=agent, model_file=model, num_sampled=1,
                                       output_dir=tmp_path / "page"))
    simulator = load_simulator(model, agent)
    [start] = sampled_page_starts(simulator, 1, 0)
    with opened_page(browser, file.as_uri()) as page:
        found = page.evaluate(PLAY, [ACTIONS[:6], None])
        hidden = np.array(page.evaluate("Array.from(dream.record.hidden)"))
        for axis in page.evaluate("dream.manifest.axes"):
            assert abs(hidden @ axis["vector"] - axis["mean"]) < 6 * axis["sd"]
        assert not page.get_by_role("button", name="Another world").count()
        assert not page.get_by_text("P(death)").count()  # mazes have no deaths
        assert page.get_by_text("keys without effect").count() == 1
    assert_same(found, expected(simulator, start.start, ACTIONS[:6]))


def test_what_the_page_cannot_run_is_refused(simulator_file, agent_path, tmp_path, capsys):
    argv = ["--agent_file", str(agent_path), "--model_file", str(simulator_file), "--output_dir",
            str(tmp_path / "page")]
    assert "spatial architecture" in refusal(script.main, argv, capsys)
    shipped = ["--agent_file", str(SHIPPED_AGENT), "--model_file", str(SHIPPED_SIMULATOR),
               "--num_sampled", "0", "--output_dir", str(tmp_path / "page")]
    assert "no starts" in refusal(script.main, shipped, capsys)
    assert not DreamPageFolder(tmp_path / "page").page_file.exists()


def test_programs_reject_operations_that_pages_do_not_have():
    with pytest.raises(NotImplementedError, match="cumsum"):
        trace(lambda x: {"y": x.cumsum(dim=0)}, x=torch.rand(3))
    program = trace(lambda x: {"y": x[1:] * torch.arange(3) + 2}, x=torch.rand(4))
    assert json.loads(json.dumps(program.description()))["inputs"] == {"x": 0}
    assert [name for name, *_ in program.instructions] == ["part", "mul", "add"]


def test_programs_keep_what_is_assigned_to_a_part():
    """Of a constant; reds if the slice is a copy. Of other values, it is refused."""
    def masked(x):
        mask = torch.ones(4)
        mask[1:3] = 0
        return {"y": x * mask}

    [mask] = trace(masked, x=torch.rand(4)).constants.values()
    assert mask.tolist() == [1, 0, 0, 1]
    with pytest.raises(NotImplementedError, match="two names"):
        trace(lambda x: {"y": (x + 1)[1:].mul_(2)}, x=torch.rand(4))
