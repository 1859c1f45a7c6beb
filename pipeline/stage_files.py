"""Files of stages in ``hyperparams/stages/``: the stages and the report of an experiment.

A file has these sections::

    settings:   settings of presets, with their defaults
    let:        names for values, computed in order
    stages:     stages, in order
    report:     title, heading, lead, analysed, opening and sections of the report

A stage has the keys of ``StageEntry``, a section of the report those of ``Section``, and files that
it shows those of ``Files``. All of them can have a condition ``if``. An item ``{include: FILE}``
stands for all items of another file, and ``{for: NAME, in: LIST, stages: [...]}`` repeats items for
each value.

Values can contain expressions of Jinja as ``${...}``; main.yml lists the names in them. A value
that consists of one expression has its type, and a list inside a list is spliced into it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from agents import rollout_files
from agents.config import load_agent_config
from analysis.decision_results import DECISIONS
from analysis.memory.sparse_report import FEATURE_DREAMS
from common.config import SETTINGS_NAME, read_yaml, typed
from common.errors import UserError, nearest
from common.files import read_json
from common.parameters import ParameterSet, flattened, id_list
from common.schemas import Schema
from envs.objects import hazards_of, objects_of
from generative import sample_files
from generative.card_tables import card_finding, read_card
from generative.config import SimulatorConfig, TrainingConfig
from generative.saliency import files as saliency_files
from generative.saliency.gradients import SUFFIXES
from generative.start_optimisation.search import OPTIMISED_STARTS
from interventions.config import SwapConfig
from interventions.direction_folders import PROBE_ATLAS, SPARSE_FEATURES
from pipeline.presets import Preset, read_stages_file
from pipeline.stage import (
    AGENT,
    CONTINUATIONS,
    PAGES,
    ROOT,
    SIMULATOR,
    Stage,
    object_parameters,
    recording_parameters,
)
from pipeline.summaries import SUMMARIES

_EXPRESSION = re.compile(r"\$\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class StageEntry:
    """A stage in a file of stages. Paths are relative to the output folder.

    Attributes:
        stage: name of the stage.
        script: module name of the script.
        result: name of a function in ``SUMMARIES``, with its arguments.
        options: flags of the script by name; null, false and empty lists leave a flag out.
        needs: names of the stages whose output the stage reads, where * matches any characters; or
            file patterns by name, where null stands for ``exports``.
        folder: folder or folders that belong to the stage alone.
        outputs: patterns of the output files; by default, all files in the folders.
        exports: patterns of the files that other stages read; by default, the outputs.
        clears: patterns of paths to delete before a run from scratch; by default, the folders.
        page: name of the built web page that the script copies.
        parameters: parameters that the script reads from YAML files: beginnings of dotted names in
            the parameter set, or names of groups, see ``_parameters_named``.
        resume: key of ``CONTINUATIONS``: true (resumed by the same command), false (run from
            scratch after an interruption), agent or simulator.
        shards: largest number of shards.
    """

    stage: str
    script: str
    result: dict[str, object]
    options: dict[str, object] | None = None
    needs: object = ()
    folder: object = ()
    outputs: object = None
    exports: object = None
    clears: object = None
    page: str | None = None
    parameters: tuple[str, ...] = ()
    resume: object = True
    shards: int = 1


@dataclasses.dataclass(frozen=True)
class Files:
    """Files of a stage that a section shows; Markdown files become pages of the report.

    Attributes:
        stage: name of the stage that writes the files.
        files: glob patterns relative to the output folder; the first ``limit`` files of each are
            shown.
        caption: caption of the files.
        limit: largest number of files per pattern.
        newest: whether to show the last files instead of the first.
    """

    stage: str
    files: tuple[str, ...]
    caption: str
    limit: int = 1
    newest: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the report: a question, its answer, and files that support it.

    Attributes:
        section: fragment of the page's URL that leads to the section.
        title: the question.
        text: description of the method, in one or two sentences.
        answer: sentence in which the name of a stage, in braces, stands for the stage's result.
        figure: files that answer the question.
        look_for: instructions for reading the figure.
        more: further files, shown on request.
        tools: interactive pages.
    """

    section: str
    title: str
    text: str
    answer: str
    figure: Files
    look_for: str
    more: tuple[Files, ...] = ()
    tools: tuple[Files, ...] = ()


@dataclasses.dataclass(frozen=True)
class Page:
    """Contents of the report of an experiment.

    Attributes:
        title: title of the browser window.
        heading: heading of the page.
        lead: introductory paragraph below the heading.
        analysed: sentence that names the analysed agents.
        sections: sections, in order.
        opening: videos at the top of the page.
        agent_file: agent whose training curve is drawn if its log is next to it; None for the
            agent that was trained in this run.
        findings: results of the full-size run to quote, by section.
    """

    title: str
    heading: str
    lead: str
    analysed: str
    sections: tuple[Section, ...]
    opening: tuple[Files, ...] = ()
    agent_file: str | None = None
    findings: dict[str, str] = dataclasses.field(default_factory=dict)


class _Reader:
    """Reader of the stages and the report of a preset.

    Args:
        preset: the preset.
        exp_name: name of the experiment.

    Attributes:
        stages: stages that have been read so far, by name.
    """

    def __init__(self, preset: Preset, exp_name: str):
        self._preset = preset
        self._parameters = ParameterSet(preset.settings["parameters"]) \
            if "parameters" in preset.settings else None
        self.stages: dict[str, Stage] = {}
        self._exports: dict[str, list[str]] = {}
        self._left_out: set[str] = set()
        self._jinja = SandboxedEnvironment(undefined=jinja2.StrictUndefined)
        game = preset.settings.get("env_name", "")
        self._names: dict[str, Any] = {
            **preset.settings, "exp_name": exp_name, "output": "{output}", "agent": AGENT,
            "simulator": SIMULATOR if SIMULATOR in preset.files else None,
            "agents": [{"name": name, "file": f"{{agent {name}}}", "described": f"{name} ({file})"}
                       for name, file in preset.agents.items()],
            "set": self._parameters.nested if self._parameters else {},
            "objects": [kind.name for kind in objects_of(game)],
            "hazards": [kind.name for kind in hazards_of(game)],
            "has": self.stages.__contains__, "patterns": _patterns, "fill": _fill,
            "ids": lambda text: id_list(text, "ids")}

    # Expressions

    def _evaluate(self, expression: str) -> Any:
        """Return the value of an expression.

        Raises:
            UserError: if it is invalid, or a name in it is unknown.
        """
        try:
            value = self._jinja.compile_expression(expression, undefined_to_none=False)(
                **self._names)
            if isinstance(value, jinja2.Undefined):
                str(value)  # raises the error that names what is unknown
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise UserError(f"{self._preset.file.name}: '{expression}': {error}") from None
        return value

    def _fill_in(self, value: Any) -> Any:
        """Return a value with the values of its expressions."""
        if isinstance(value, str):
            whole = _EXPRESSION.fullmatch(value)
            return self._evaluate(whole[1]) if whole else _EXPRESSION.sub(
                lambda match: str(self._evaluate(match[1])), value)
        if isinstance(value, dict):
            return {self._fill_in(key): self._fill_in(item) for key, item in value.items()}
        if isinstance(value, list):
            items: list = []
            for item in map(self._fill_in, value):
                items += item if isinstance(item, list | tuple) else [item]
            return items
        return value

    def _items(self, content: dict, kind: str, folder: Path) -> Iterator[dict]:
        """Yield the items of a list without ``include``, ``for`` and ``if``.

        Args:
            content: contents of the file; its ``let`` is evaluated first.
            kind: key of the list, "stages" or "sections".
            folder: folder of the file.
        """
        for name, value in content.get("let", {}).items():
            self._names[name] = self._fill_in(value)
        items = (content if kind == "stages" else content.get("report", content)).get(kind)
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise UserError(f"{self._preset.file.name}: '{kind}' must be a list of mappings")
        for item in items:
            if not self._holds(item):
                left_out = read_stages_file(folder / item["include"])["stages"] if (
                    "include" in item) else [item]
                self._left_out.update(self._fill_in(stage["stage"]) for stage in left_out
                                      if "stage" in stage)
            elif "include" in item:
                file = folder / item["include"]
                yield from self._items(read_stages_file(file), kind, file.parent)
            elif "for" in item:
                before = dict(self._names)
                for value in self._fill_in(item["in"]):
                    self._names[item["for"]] = value
                    yield from self._items({kind: item[kind]}, kind, folder)
                self._names = before
            else:
                yield {key: value for key, value in item.items() if key != "if"}

    def _holds(self, item: dict) -> bool:
        return "if" not in item or bool(self._evaluate(str(item["if"])))

    # Stages

    def read_stages(self) -> tuple[Stage, ...]:
        """Return all stages, in order."""
        preset = self._preset
        for item in self._items(read_stages_file(preset.file), "stages", preset.file.parent):
            stage = self._stage(self._fill_in(item))
            if stage.name in self.stages:
                raise UserError(f"{preset.file.name}: there are two stages '{stage.name}'")
            self.stages[stage.name] = stage
        return tuple(self.stages.values())

    def _stage(self, item: dict) -> Stage:
        source = f"{self._preset.file.name}, stage '{item.get('stage')}'"
        entry: StageEntry = typed(StageEntry, item, source)
        folders = _listed(entry.folder)
        outputs = _listed([f"{folder}/**/*.*" for folder in folders]
                          if entry.outputs is None else entry.outputs)
        clears = folders if entry.clears is None else _listed(entry.clears)
        for pattern in (*outputs, *clears):
            path = PurePath(pattern.removeprefix("!"))
            if path.is_absolute() or ".." in path.parts:
                raise UserError(f"{source}: '{pattern}' is not in the output folder")
        if not outputs:
            raise UserError(f"{source}: give 'folder' or 'outputs'")
        self._exports[entry.stage] = outputs if entry.exports is None else _listed(entry.exports)
        argv = _flags(entry.options or {})
        files = [word for word in dict.fromkeys(argv) if word in self._preset.files]
        if entry.page is not None:
            _chosen(PAGES, page := f"{{{entry.page}}}", source)
            files.append(page)
        return Stage(
            entry.stage, entry.script, tuple(argv), tuple(outputs),
            _summary(entry.result, source), self._needs(entry.needs, source), tuple(files),
            self._parameters_of(entry.parameters, source), tuple(clears),
            _chosen(CONTINUATIONS, entry.resume, source), entry.shards)

    def _needs(self, needs: object, source: str) -> dict[str, tuple[str, ...]]:
        """Return patterns of the input files, by name of the stage that writes them.

        Raises:
            UserError: if there is no such stage before this one.
        """
        found: dict[str, tuple[str, ...]] = {}
        given = needs if isinstance(needs, dict) else dict.fromkeys(_listed(needs))
        for name, patterns in given.items():
            matching = fnmatch.filter(self.stages, name)
            if not matching and not fnmatch.filter(self._left_out, name):
                raise UserError(f"{source}: 'needs' names no earlier stage '{name}'"
                                f"{nearest(name, self.stages)}")
            for stage in matching:
                found[stage] = tuple(_listed(patterns or self._exports[stage]))
        return found

    def _parameters_of(self, names: Sequence[str], source: str) -> dict[str, object]:
        """Return the parameters of a stage by dotted name, see the module's documentation."""
        found: dict[str, object] = {}
        for name in names:
            if "." in name:
                assert self._parameters is not None
                values = self._parameters.flattened(name)
                if not values:
                    raise UserError(f"{source}: no parameter begins with '{name}'")
            else:
                values = _chosen(self._parameters_named, name, source)()
            found |= values
        return found

    @property
    def _parameters_named(self) -> dict[str, Callable[[], dict[str, object]]]:
        """Functions that return groups of parameters, by the name of the group."""
        settings, values = self._preset.settings, self._parameters
        groups: dict[str, Callable[[], dict[str, object]]] = {
            "objects": lambda: object_parameters(settings["env_name"])}
        if values is None:  # a preset without parameter set
            return groups
        return groups | {
            "recording": lambda: recording_parameters(
                settings["env_name"], settings["recording_param_name"], values),
            "agent_training": lambda: flattened(vars(load_agent_config(
                settings["agent_training"]["param_name"])), "agent."),
            "simulator": lambda: values.named(SimulatorConfig),
            "simulator_training": lambda: values.named(TrainingConfig),
            "swap": lambda: values.named(SwapConfig),
            # Sizes of the simulator, for published files that do not store them.
            "published_sizes": lambda: {} if not settings["model_file"] or (
                ROOT / settings["model_file"]).with_name(SETTINGS_NAME).is_file()
            else values.named(SimulatorConfig)}

    # The report

    def read_page(self) -> Page:
        """Return the contents of the report."""
        preset, source = self._preset, f"{self._preset.file.name}, 'report'"
        content = read_stages_file(preset.file)
        if "report" not in content:
            raise UserError(f"{preset.file.name}: the key 'report' is missing")
        sections = [typed(Section, self._fill_in({**item, **{
            key: [{name: value for name, value in files.items() if name != "if"}
                  for files in item[key] if self._holds(files)]
            for key in ("more", "tools") if key in item}}), source)
            for item in self._items(content, "sections", preset.file.parent)]
        findings = preset.settings.get("findings")
        return typed(Page, {**self._fill_in(
            {key: value for key, value in content["report"].items() if key != "sections"}),
            "sections": sections, "agent_file": preset.settings.get("agent_file"),
            "findings": read_findings(ROOT / findings) if findings else {}}, source)


def all_stages(preset: Preset, exp_name: str) -> tuple[Stage, ...]:
    """Return all stages of an experiment, in the order in which they run.

    Args:
        preset: preset of the experiment.
        exp_name: name of the experiment.

    Raises:
        UserError: if the file of stages is invalid; the message names the stage.
    """
    return _Reader(preset, exp_name).read_stages()


def page_of(preset: Preset) -> Page:
    """Return the contents of the report of an experiment with a preset."""
    return _Reader(preset, "").read_page()


def read_findings(file: Path) -> dict[str, str]:
    """Return results of a full-size run as sentences, by section of the report.

    Args:
        file: YAML file; cards in it are relative to its folder.
    """
    findings = {}
    for section, finding in read_yaml(file).items():
        if "card" in finding:
            card = file.parent / finding["card"]
            findings[section] = card_finding(
                read_card(card), read_json(card.with_suffix(".json")), finding["step"])
        else:
            findings[section] = finding["text"]
    return findings


def _listed(value: object) -> list[str]:
    """Return a list of texts, given a list or a single text.

    Raises:
        UserError: if the value is neither.
    """
    texts: list[Any] = [*value] if isinstance(value, list | tuple) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"expected a text or a list of texts, not {value!r}")
    return texts


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return the command-line flags for options."""
    argv: list[str] = []
    for name, value in options.items():
        values = [*value] if isinstance(value, list | tuple) else [value]
        if value is True:
            argv.append(f"--{name}")
        elif value is not None and value is not False and values:
            argv += [f"--{name}", *map(str, values)]
    return argv


def _chosen(known: Mapping, name: object, source: str) -> Any:
    """Return the value of a name.

    Raises:
        UserError: if the name is unknown.
    """
    if name not in known:
        raise UserError(f"{source}: unknown '{name}'{nearest(str(name), map(str, known))}")
    return known[name]


def _summary(result: Mapping[str, Any], source: str) -> Callable[[Path], str]:
    """Return ``Stage.result``, given the name of a function and its arguments."""
    (name, first), *more = result.items()
    function = _chosen(SUMMARIES, name, source)
    return lambda output: function(output, first, **dict(more))


def _fill(pattern: str, names: Sequence[str]) -> list[str]:
    """Return a pattern with each of the names instead of the asterisk."""
    return [pattern.replace("*", name) for name in names]


def _patterns(kind: str, folder: str) -> list[str]:
    """Return patterns of the files in a folder that other scripts read.

    Args:
        kind: a key of ``_PATTERNS``.
        folder: folder, relative to the output folder.
    """
    return [f"!{folder}/{pattern[1:]}" if pattern.startswith("!") else f"{folder}/{pattern}"
            for pattern in _PATTERNS[kind]]


def _entries(schema: Schema, *names: str) -> tuple[str, ...]:
    return schema.settings_name, *(schema.entry(name).pattern() for name in names)


_PATTERNS = {
    "recording": rollout_files.PATTERNS,
    "samples": sample_files.PATTERNS,
    "saliency": (*saliency_files.DATA_PATTERNS, *(f"!sample_*/*{suffix}.*" for suffix in SUFFIXES)),
    "saliency_films": (saliency_files.VIDEO_PATTERN,
                       *(f"!sample_*/*{suffix}.mp4" for suffix in SUFFIXES)),
    **{f"saliency{suffix}": tuple(re.sub(r"\.(?=\w+$)", f"{suffix}.", pattern)
                                  for pattern in saliency_files.DATA_PATTERNS)
       for suffix in SUFFIXES},
    "decisions": _entries(DECISIONS, "decisions", "films"),
    "sparse_features": _entries(SPARSE_FEATURES, "features", "effects", "sae", "examples"),
    "probe_atlas": _entries(PROBE_ATLAS, "weights"),
    "optimised_starts": (*_entries(OPTIMISED_STARTS, "starts"), *(
        f"penalty_1/{pattern}" for pattern in sample_files.PATTERNS)),
    "feature_dreams": (*_entries(FEATURE_DREAMS, "dreams", "starts"), *(
        f"penalty_1/{pattern}" for pattern in sample_files.PATTERNS))}
