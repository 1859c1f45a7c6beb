r"""Create the images of the shipped agent and simulator in docs/images from the output of
run_pipeline.py:

    python run_pipeline.py --preset section:demo --output_dir OUTPUT
    python record_gen_samples.py --agent_file pretrained/coinrun_hard/model.pth \
        --model_file pretrained/coinrun_hard_simulator/model.pt --interpreting_params_name demo \
        --data_dir OUTPUT/rollouts/data --generated_data_dir OUTPUT/worlds --num_samples 60 \
        --num_worlds 12 --num_sim_steps 32 --sample_actions --no_videos
    python -m tools.pictures OUTPUT

The contents of each image are chosen by fixed rules. The screenshots of the three pages need
Chromium and come from the preset demo; `interventions.png` comes from 100 levels per alteration.
`python -m maze.table` draws `maze_findings.png`. Images that cannot be created, for example because
a stage is not finished, are reported with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import torch
from PIL import Image, ImageDraw

from agents.rollout_files import POSITION_COLUMNS, RolloutFolder
from analysis.influences.comparison import COMPARISON_FILES
from analysis.panel_contents import recorded_frames
from analysis.panel_files import PanelFolder
from attribution.page_files import AttributionPageFolder
from common.cli import Parser, from_zero
from common.devices import Compute
from common.errors import UserError, script_main
from common.files import atomic_path
from common.game_constants import FRAME_SIZE, WORLD_SIZE
from common.page_files import PageFolder
from common.results import ResultStore
from common.video import FULL_REWARD, strip
from generative.config import SimulatorConfig
from generative.dataset import WindowPlace
from generative.loss_over_time import LOSS_OVER_TIME
from generative.rendered_worlds import rendered_images
from generative.runs import open_simulator
from generative.saliency.files import SaliencyFolder
from generative.sample_files import SampleFolder
from generative.spatial import split_state
from generative.world_contents import draw_worlds
from maze.field.page_export import MazePageFolder
from pipeline.presets import load_preset
from pipeline.records import DONE, Experiment
from pipeline.stage import FOLDERS, ROOT
from pipeline.stage_files import all_stages
from tools.browser import chromium, opened_page, running_browser

IMAGES = ROOT / "docs" / "images"
AGENT, SIMULATOR = (ROOT / "pretrained" / name for name in (
    "coinrun_hard/model.pth", "coinrun_hard_simulator/model.pt"))
CPU = Compute(torch.device("cpu"), bfloat16=False)
DIES_AFTER = 8
AROUND, FIRST_ROW, FIRST_COLUMN = 144, 20, 44  # pixels per side, and first ones, of what is shown
ENDED = 0.5  # samples with at least this probability of the episode's end are excluded
FILMS, FILM_SIZE, FILM_MILLISECONDS = 4, 144, 250
PANEL_STEP = 3  # one step before the function of the saliency map is evaluated
VIEWPORT = {"width": 1440, "height": 900}
COLOURS = 256  # size of the palette, which keeps rare colours; reduces files to a third


@dataclasses.dataclass(frozen=True)
class Shown:
    """The output folder, and settings of the images.

    Attributes:
        output: output folder of run_pipeline.py.
        component: index of the component of the agent's hidden state whose saliency is shown.
    """

    output: Path
    component: int


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image in docs/images.

    Attributes:
        name: file name.
        stages: pipeline stages that must be finished.
        make: returns the image, or the frames of an animation.
        browser: whether the image is a screenshot of a page.
    """

    name: str
    stages: tuple[str, ...]
    make: Callable[[Shown], Image.Image | list[Image.Image]]
    browser: bool = False


def stored(pattern: str) -> Callable[[Shown], Image.Image]:
    """Return a function that opens the alphabetically first image in the output folder that matches
    a pattern."""
    return lambda shown: Image.open(min(shown.output.glob(pattern)))


def simulator(shown: Shown) -> Image.Image:
    """Return the stored image of a window: the one with the median image error among the windows
    that have an image."""
    store = ResultStore(shown.output / "loss_over_time", LOSS_OVER_TIME)
    errors = store.read("loss", "image").mean(axis=0)  # (windows,)
    drawn = [(float(error), window) for window, error in zip(store.settings()["windows"], errors)
             if store.has("strip", f"{window:06d}")]
    _, window = sorted(drawn)[len(drawn) // 2]
    return Image.open(store.file_of("strip", f"{window:06d}"))


def shown_samples(shown: Shown) -> list[int]:
    """Return the numbers of evenly spaced samples with saliency, at most FILMS.

    Samples that end in the simulator or in the recording are left out, unless fewer than FILMS
    samples remain.
    """
    folder = SaliencyFolder(shown.output / "samples" / "informed_init")
    samples = folder.samples
    numbers = np.array([number for number, functions in folder.finished(samples.numbers()).items()
                        if functions])
    ends = samples.stacked_field("terminals", numbers.tolist())  # (samples, steps)
    goes_on = (ends.max(axis=1) < ENDED) & [
        recorded is not None and len(recorded) == ends.shape[1] for recorded in (
            recorded_frames(_recording(shown), samples, number, ends.shape[1])
            for number in numbers)]
    if goes_on.sum() >= FILMS:
        numbers = numbers[goes_on]
    places = np.linspace(0, len(numbers) - 1, min(FILMS, len(numbers))).round().astype(int)
    return numbers[places].tolist()


def _recording(shown: Shown) -> RolloutFolder:
    return RolloutFolder(shown.output / "rollouts" / "data")


def saliency(shown: Shown) -> list[Image.Image]:
    """Return an animation of samples: recorded and imagined frames, and saliency maps of value,
    action and a component."""
    folder = SaliencyFolder(shown.output / "samples" / "informed_init")
    numbers = shown_samples(shown)
    functions = {"value": "value", "action": "action", f"component {shown.component}":
                 direction_function(folder, numbers, shown.component)}
    films = []
    for number in numbers:
        imagined = folder.samples.sample(number).frames
        recorded = recorded_frames(_recording(shown), folder.samples, number, len(imagined))
        if recorded is None or len(recorded) < len(imagined):
            raise UserError(f"the recording of sample {number} ends before the sample")
        films.append([recorded, imagined, *(folder.saliency(number, name).processed
                                            for name in functions.values())])
    titles = ("recorded", "imagined", *(f"saliency: {title}" for title in functions))
    return [_with_titles(strip([[film[t] for film in row] for row in films], FILM_SIZE), titles)
            for t in range(len(films[0][0]))]


def _with_titles(image: Image.Image, titles: Sequence[str]) -> Image.Image:
    """Write titles, evenly spaced, above the columns of a strip of frames."""
    height = FILM_SIZE // 6
    result = Image.new("RGB", (image.width, image.height + height), (255, 255, 255))
    result.paste(image, (0, height))
    for column, title in enumerate(titles):
        ImageDraw.Draw(result).text((column * image.width // len(titles), 2), title,
                                    fill=(0, 0, 0), font_size=height // 2 + 2)
    return result


def imagined_worlds(shown: Shown) -> list[Image.Image]:
    """Return an animation of the game and of four of its imagined worlds, from the same start.

    It shows every other step of the first start with a world in which the agent dies after at least
    DIES_AFTER steps and three in which it does not, while the recorded episode goes on. The first
    such worlds are shown. Frames are drawn at the camera's place, over the surroundings at the
    start.
    """
    folder = SampleFolder(shown.output / "worlds" / "informed_init")
    by_start: dict[int, list[int]] = {}
    for number in folder.numbers():
        by_start.setdefault(folder.origin(number).start, []).append(number)
    for numbers in by_start.values():
        samples, origin = folder.stacked(numbers), folder.origin(numbers[0])
        steps = samples.frames.shape[1]
        recorded = recorded_frames(_recording(shown), folder, numbers[0], steps)
        ends = samples.terminals >= ENDED
        ends_at = np.where(ends.any(axis=1), ends.argmax(axis=1), steps)
        coins = (samples.rewards >= FULL_REWARD / 2).any(axis=1)
        dies = np.flatnonzero((ends_at >= DIES_AFTER) & (ends_at < steps) & ~coins)
        lives = np.flatnonzero((ends_at == steps) & ~coins)
        if recorded is None or len(recorded) < steps or not len(dies) or len(lives) < 3:
            continue
        chosen = sorted([dies[0], *lives[:3]])
        simulator = open_simulator(SIMULATOR, AGENT, SimulatorConfig(), CPU)
        world = folder.worlds([numbers[row] for row in chosen])
        assert simulator.squares is not None and world is not None and origin.episode is not None
        around = draw_worlds(simulator.squares, world, WORLD_SIZE)
        place = WindowPlace(origin.episode, origin.frame or 0)
        game = rendered_images(_recording(shown), [place]).images[0]
        steps_of = _recording(shown).steps(origin.episode)[list(POSITION_COLUMNS)].to_numpy()
        moved = (steps_of[place.frame:place.frame + steps] - steps_of[place.frame]) * [1, -1]
        columns = [_Column(game, recorded, moved * simulator.squares.pixels_per_square, steps)] + [
            _Column(around[i], samples.frames[row], split_state(
                torch.from_numpy(samples.env_h[row]).float(),
                simulator.config).camera.displacement.numpy(), int(ends_at[row]))
            for i, row in enumerate(chosen)]
        titles = ["the real game"] + [
            f"world {row + 1}: {'it dies' if ends_at[row] < steps else 'it lives'}"
            for row in chosen]
        return [_with_titles(strip([[column.drawn(t) for column in columns]], WORLD_SIZE),
                             titles) for t in range(0, steps, 2)]
    raise UserError(f"no start in {folder.path} has a world in which the agent dies and three in "
                    "which it does not; record more samples")


@dataclasses.dataclass(frozen=True)
class _Column:
    """Frames that are shown over their surroundings.

    Attributes:
        around: surroundings at the start (WORLD_SIZE, WORLD_SIZE, C).
        frames: frames (T, H, W, C).
        moved: displacement of the camera (T, 2), in pixels to the right and down.
        end: step of the end, whose frame has a red outline, and which is shown from then on.
    """

    around: np.ndarray
    frames: np.ndarray
    moved: np.ndarray
    end: int

    def drawn(self, step: int) -> np.ndarray:
        """Draw the frame of a step over its darkened surroundings (AROUND, AROUND, C)."""
        step, margin = min(step, self.end), FRAME_SIZE
        canvas = np.pad(self.around // 2, ((margin, margin), (margin, margin), (0, 0)))
        left, top = (np.round(self.moved[step]).astype(int) + 2 * FRAME_SIZE).clip(
            1, len(canvas) - FRAME_SIZE - 1)
        canvas[top - 1:top + FRAME_SIZE + 1, left - 1:left + FRAME_SIZE + 1] = (
            (220, 40, 30) if step == self.end else (255, 255, 0))
        canvas[top:top + FRAME_SIZE, left:left + FRAME_SIZE] = self.frames[step]
        top, left = margin + FIRST_ROW, margin + FIRST_COLUMN
        return canvas[top:top + AROUND, left:left + AROUND]


def direction_function(folder: SaliencyFolder, numbers: list[int], component: int) -> str:
    """Return the name of the saliency function of a component, preferring ICA to PCA.

    Args:
        numbers: numbers of the samples.

    Raises:
        UserError: if not all of these samples have a saliency map of the component.
    """
    available = set.intersection(*map(set, folder.finished(numbers).values()))
    for name in (f"hx_direction_{component}_ica", f"hx_direction_{component}_pca"):
        if name in available:
            return name
    raise UserError(f"the samples have no saliency of component {component}; see --component")


def behaviour(shown: Shown) -> Image.Image:
    """Return the figure of the most frequent behaviour, or of all behaviours if no sample has one.
    """
    labels = ResultStore(shown.output / FOLDERS.comparison, COMPARISON_FILES).read("behaviours")
    shows_one = labels[labels >= 0]
    name = (f"behaviour_{np.bincount(shows_one).argmax():02d}" if len(shows_one)
            else "behaviours_overview")
    return Image.open(shown.output / FOLDERS.behaviour_plots / f"{name}.png")


def panel(shown: Shown) -> Image.Image:
    """Return a screenshot of the panel at the first sample of ``shown_samples``."""
    view = {"sample": f"informed_init/{shown_samples(shown)[0]}", "step": PANEL_STEP,
            "saliency": "value"}
    return _photographed(PanelFolder(shown.output / FOLDERS.panel), f"#{urlencode(view)}")


def _photographed(folder: PageFolder, fragment: str = "") -> Image.Image:
    """Take a screenshot of a page from disk, as it opens or at a fragment of its URL."""
    address = folder.page_file.absolute().as_uri() + fragment
    with running_browser() as browser, opened_page(browser, address, viewport=VIEWPORT) as page:
        if folder.PAGE == MazePageFolder.PAGE:
            page.wait_for_selector(".exact")  # probabilities of the walks' outcomes
        return Image.open(io.BytesIO(page.screenshot()))


PICTURES = (
    Picture("agent.png", ("render",), stored("videos/*_strip.png")),
    Picture("simulator.png", ("loss_over_time",), simulator),
    Picture("saliency.gif", ("simulate", "saliency"), saliency),
    Picture("imagined_worlds.gif", ("record",), imagined_worlds),
    Picture("behaviour.png", ("consistency", "plot_behaviours"), behaviour),
    Picture("interventions.png", ("interventions",),
            stored(f"{FOLDERS.interventions}/effects.png")),
    Picture("made_to_order.png", ("optimise_start",),
            stored("samples/made_to_order/pictures/order_000.png")),
    Picture("saliency_checks.png", ("saliency_checks",),
            stored("analysis/attribution/saliency_checks/checks.png")),
    Picture("panel.png", ("simulate", "panel"), panel, browser=True),
    Picture("attribution_page.png", ("attribution_page",), lambda shown: _photographed(
        AttributionPageFolder(shown.output / "analysis" / "attribution" / "page")), browser=True),
    Picture("maze_page.png", ("maze_page",), lambda shown: _photographed(
        MazePageFolder(shown.output / "analysis" / "maze" / "page")), browser=True))


def why_not(picture: Picture, experiment: Experiment, made: set[str]) -> str:
    """Return the reason why an image cannot be created, or "" if it can.

    Args:
        picture: the image.
        experiment: output folder with the records of the stages.
        made: names of the stages in the experiment's preset.
    """
    never = [stage for stage in picture.stages if stage not in made]
    if never:
        return f"this preset has no {never[0]}"
    records = {stage: experiment.record(stage) for stage in picture.stages}
    lacking = [stage for stage, record in records.items() if not record or record.status != DONE]
    if lacking:
        return f"finish {' and '.join(lacking)} first"
    if picture.browser and chromium() is None:
        return "there is no Chromium on this machine; apt-get install chromium"
    return ""


def save(path: Path, made: Image.Image | list[Image.Image], browser: bool) -> None:
    """Write an image as PNG, or several frames as GIF.

    Args:
        path: file to write.
        made: image, or frames of an animation.
        browser: whether the image is a screenshot, which needs all colours for its colour bars.
    """
    frames = [frame.convert("RGB") for frame in (made if isinstance(made, list) else [made])]
    if not browser:
        frames = [frame.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=3,
                                 dither=Image.Dither.NONE) for frame in frames]
    more: dict[str, Any] = {}
    if len(frames) > 1:
        more = {"save_all": True, "append_images": frames[1:], "duration": FILM_MILLISECONDS,
                "loop": 0}
    with atomic_path(path) as temporary:
        frames[0].save(temporary, optimize=True, **more)
    print(f"wrote {path}")


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("output", type=Path, help="output folder of run_pipeline.py")
    flags.add_argument("--images_dir", type=Path, default=IMAGES, help="folder for the images")
    flags.add_argument("--only", nargs="+", choices=[picture.name for picture in PICTURES],
                       metavar="PICTURE", help="create only the images with these file names")
    flags.add_argument("--component", type=from_zero, default=0,
                       help="index of the hidden-state component whose saliency is shown "
                            "(default: 0)")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    experiment = Experiment(args.output)
    description = experiment.description()
    if not description:
        raise UserError(f"{args.output} holds no experiment; run run_pipeline.py --preset "
                        f"section:demo --output_dir {args.output} first")
    stages = {stage.name for stage in all_stages(load_preset(description["preset"]),
                                                 description["name"])}
    lacking = []
    for picture in PICTURES:
        if args.only and picture.name not in args.only:
            continue
        reason = why_not(picture, experiment, stages)
        if reason:
            lacking.append(f"{picture.name} ({reason})")
            continue
        try:
            made = picture.make(Shown(args.output, args.component))
        except UserError as error:  # samples of other commands may be missing
            lacking.append(f"{picture.name} ({error})")
        else:
            save(args.images_dir / picture.name, made, picture.browser)
    if lacking:
        raise UserError(f"these images could not be created: {', '.join(lacking)}")


if __name__ == "__main__":
    raise SystemExit(main())
