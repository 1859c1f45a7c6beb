"""Build the attribution page, see ``AttributionPageOptions``. It opens from disk and from any web
server."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from attribution.checking.agent_checks import CHECK_FILES, CHECKS
from attribution.config import ANALYSES
from attribution.page_agent import AttributedAgent
from attribution.page_contents import gather, join_contents
from attribution.page_files import (
    MAX_NAME,
    AttributionPageFolder,
    PageContent,
    write_page,
)
from attribution.results import LayerFeatures
from attribution.trajectories import (
    AUTO,
    GAMMA,
    LAMBDA,
    RAW,
    SLOPES,
    AdvantageSettings,
    find_advantage_settings,
)
from common.cli import count
from common.documents import render_markdown
from common.errors import UserError, nearest, shortened
from common.files import read_json
from common.options import LogOptions, command, option
from common.page_files import templates
from common.results import ResultStore, Schema

PAGE = Schema("page of attribution.page", "python -m attribution.page",
              results=AttributionPageFolder.FILES, replaced=True)
REPORT_PAGE = "report.html"  # report of attribution.checks


def reward_scale(text: str) -> str | float:
    """argparse type: ``auto``, ``raw`` or a number above 0."""
    if text in (AUTO, RAW):
        return text
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be {AUTO}, {RAW} or a number above 0, not '{text}'")
    return number


def share(text: str) -> float:
    """argparse type: a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, not '{text}'")
    return number


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributionPageOptions(LogOptions):
    """Build the attribution page: an interactive web page for stepping through trajectories and
    seeing which features raised or lowered an agent's outputs."""

    agent_file: Path = option(help="agent whose attributions are shown")
    data_dir: Path = option(help="recording on which the attributions were computed: the data "
                                 "folder of record.py")
    beside_agent_file: Path | None = option(
        None, "second agent, such as an edited one, whose trajectories are also shown, with the "
              "same features")
    beside_data_dir: Path | None = option(None, "recording of the second agent")
    beside_attribution_dir: Path | None = option(None, "attributions of the second agent")
    features_dir: Path = option(ANALYSES / "features", "output folder of attribution.features")
    attribution_dir: Path = option(ANALYSES / "attribution",
                                   "output folder of attribution.attribute")
    activations: tuple[str, ...] | None = option(
        None, "short names of the layers for which the page also shows the activations of "
              "features; if not given, layers of at most 16 x 16 cells, because the activations of "
              "larger layers take more space than the attributions", nargs="*", metavar="LAYER")
    objects_dir: Path = option(
        ANALYSES / "objects", "output folder of attribution.objects; its names of features are "
                              "used if they belong to the same features")
    checks_dir: Path = option(
        ANALYSES / "checks", "output folder of attribution.checks; the page links to its report, "
                             "if there is one")
    failure_causes: bool = option(
        False, "replay the failed episodes in the real game, and list them by cause of failure")
    exp_name: str = option("Attribution", "name of the experiment, used as the title of the page")
    bookmarks: int = option(16, "maximum number of frames in each list of bookmarks", type=count)
    reward_scale: str | float = option(
        AUTO, f"factor that converts rewards to the unit of the agent's values: {AUTO} reads it "
              f"from the agent file or estimates it from the recording; {RAW} is 1; or a number",
        type=reward_scale)
    gamma: float | None = option(
        None, "discount of the advantages; by default that of the agent's file or training run, or "
              f"{GAMMA} if neither has one", type=share)
    lmbda: float | None = option(
        None, "lambda of the advantages; by default that of the agent's file or training run, or "
              f"{LAMBDA} if neither has one", type=share)
    labels: Path | None = option(
        None, "JSON file of feature names, as saved by the page: by layer and by the feature's "
              "number on the page, counted from 1")
    output_dir: Path = option(ANALYSES / "page", "folder to write to")

    def open_agents(self) -> list[AttributedAgent]:
        """Open the agent, and the second one if there is one.

        Raises:
            UserError: if a folder of the second agent is not given, or see ``AttributedAgent``.
        """
        paths = [(self.agent_file, self.data_dir, self.attribution_dir)]
        if self.beside_agent_file:
            if self.beside_data_dir is None or self.beside_attribution_dir is None:
                raise UserError("--beside_agent_file also needs --beside_data_dir and "
                                "--beside_attribution_dir")
            paths.append((self.beside_agent_file, self.beside_data_dir,
                          self.beside_attribution_dir))
        return [AttributedAgent(*files, self.features_dir, self.objects_dir, self.activations)
                for files in paths]


def write_report(page: Path, temporary: Path, checks: ResultStore, title: str) -> None:
    """Write the report of attribution.checks as an HTML page, if there is one.

    Args:
        page: folder of the page, to which the links of the report are relative.
        temporary: folder to write to.
        checks: results of attribution.checks, which may be missing.
        title: title of the HTML page.
    """
    if not checks.has("report"):
        return
    body = render_markdown(checks.file_of("report"),
                           lambda target: os.path.relpath(target, page.resolve()))
    text = templates(Path(__file__).parent).get_template("document.html.j2").render(
        title=title, back=("index.html", "Back to the attribution page"), body=body)
    (temporary / REPORT_PAGE).write_text(text, encoding="utf-8")


def report_addresses(checks: ResultStore) -> dict[str, str]:
    """Return the URL of each check's section in the report, relative to the page's folder, by the
    name of the check, for checks with a table; empty without a report.

    Args:
        checks: results of attribution.checks, which may be missing.
    """
    return {check: f"{REPORT_PAGE}#{check}" for check in CHECKS
            if checks.has("report") and checks.has(f"{check}_table")}


def read_labels(path: Path, features: dict[str, LayerFeatures]) -> dict[str, dict[int, str]]:
    """Read the names of features that the user gave on the page and saved.

    Args:
        path: JSON file of names by layer and by the feature's number on the page, from 1.
        features: features by short name of the layer.

    Returns:
        Names by layer and feature, with features counted from 0.

    Raises:
        UserError: if the file is missing or damaged, or names an unknown layer or feature.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(names, dict)
                                                for names in content.values()):
        raise UserError(f"{path} holds no names of features by layer, such as "
                        '{"2b": {"1": "a name"}}')
    labels: dict[str, dict[int, str]] = {}
    for layer, names in content.items():
        if layer not in features:
            raise UserError(f"{path} has names for a layer '{layer}', which is not shown"
                            f"{nearest(layer, features)}")
        for number, name in names.items():
            count = features[layer].number
            if number not in map(str, range(1, count + 1)):
                raise UserError(f"{path} has a name for feature '{shortened(number, 100)}' of "
                                f"{layer}, whose features are numbered 1 to {count}")
            if not isinstance(name, str) or len(name) > MAX_NAME:
                raise UserError(f"in {path} the name of feature {number} of {layer} is not a text "
                                f"of at most {MAX_NAME} characters")
            labels.setdefault(layer, {})[int(number) - 1] = name
    return labels


def gather_all(options: AttributionPageOptions, agents: Sequence[AttributedAgent]
               ) -> tuple[PageContent, AdvantageSettings]:
    """Gather the content of the page, and the unit of its advantages."""
    settings = find_advantage_settings(options.agent_file, options.reward_scale,
                                       agents[0].recording.all_steps())
    settings = dataclasses.replace(settings, **{
        name: value for name, value in (("gamma", options.gamma), ("lmbda", options.lmbda))
        if value is not None})
    reports = report_addresses(ResultStore(options.checks_dir, CHECK_FILES))
    contents = [
        gather(agent, options.exp_name, settings,
               read_labels(options.labels, agent.features) if options.labels else {},
               options.bookmarks, options.failure_causes, reports) for agent in agents]
    return join_contents(*contents) if len(contents) > 1 else contents[0], settings


def build_page(options: AttributionPageOptions) -> Path:
    """Build the page, and return its file."""
    output = AttributionPageFolder(options.output_dir)
    store = ResultStore(output.path, PAGE)
    store.check_replaceable()
    AttributionPageFolder.built()
    agents = options.open_agents()
    content, settings = gather_all(options, agents)
    begin = time.perf_counter()
    with store.replace({
            "exp_name": options.exp_name, "agent_sha256": agents[0].checksum,
            "recording_sha256": agents[0].recording.sha256,
            "beside_agent_sha256": agents[1].checksum if len(agents) > 1 else None,
            "bookmarks": options.bookmarks, "activations": options.activations,
            "features": {name: each.checksum for name, each in agents[0].features.items()},
            "unit": content.unit, "labels": content.labels}) as temporary:
        write_page(temporary, content)
        write_report(output.path, temporary, ResultStore(options.checks_dir, CHECK_FILES),
                     options.exp_name)
        size = sum(path.stat().st_size for path in temporary.rglob("*"))
    slope = content.unit["slope"]
    print(f"{content.steps.num_trajectories} trajectories, {len(content.steps)} frames, "
          f"{len(content.layers)} layers, {len(content.outputs)} outputs; slope of returns on "
          f"values with rewards scaled by {settings.reward_scale:.4g}: "
          + ("unknown" if slope is None else f"{slope:.2f} ({content.unit['slope_low_95']:.2f} to "
             f"{content.unit['slope_high_95']:.2f})"))
    if content.unit["off"]:
        print(f"warning: this interval lies outside {SLOPES[0]} to {SLOPES[1]}, so values and "
              "rewards do not seem to have the same unit, and advantages may be wrong; choose "
              "another --reward_scale")
    print(f"wrote {output.path}, {size / 1e6:.1f} MB in {time.perf_counter() - begin:.0f} s; open "
          f"{output.page_file.absolute()}")
    return output.page_file


main = command(AttributionPageOptions, build_page)

if __name__ == "__main__":
    raise SystemExit(main())
