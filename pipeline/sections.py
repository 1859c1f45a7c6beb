"""Summary pages of experiments: each section asks a question and answers it with results."""

from __future__ import annotations

import dataclasses

from common.files import read_json
from generative.card_tables import CARDS, card_finding, read_card
from maze.studies import claims
from pipeline.attribution_stages import ROOM as ATTRIBUTION
from pipeline.maze_stages import ROOM, TABLE
from pipeline.memory_stages import PATCHING
from pipeline.memory_stages import ROOM as MEMORY_ROOM
from pipeline.presets import AnyPreset, AttributionPreset, MazePreset, MemoryPreset
from pipeline.stage import FOLDERS

STRIP_SAMPLES = 3
SIMULATOR_SECTION = "simulator"
TRAINING_CURVE = "report/training_curve.png"  # curve of the analysed agent, drawn by the report


@dataclasses.dataclass(frozen=True)
class Files:
    """Files of a stage that a section shows; Markdown files become pages of the report.

    Attributes:
        stage: name of the stage that writes the files.
        patterns: glob patterns relative to the output folder; the first ``limit`` files of each are
            shown.
        caption: caption of the files.
        limit: largest number of files per pattern.
        newest: whether to show the last files instead of the first.
    """

    stage: str
    patterns: tuple[str, ...]
    caption: str
    limit: int = 1
    newest: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page: a question, its answer, and files that support it.

    Attributes:
        anchor: fragment of the page's URL that leads to the section.
        title: the question.
        text: description of the method, in one or two sentences.
        answer: sentence in which the name of a stage, in braces, stands for the stage's result.
        figure: files that answer the question.
        look_for: instructions for reading the figure.
        full_size: results of the full-size run; "" if those of a small run are enough.
        more: further files, shown on request.
        tools: interactive pages.
    """

    anchor: str
    title: str
    text: str
    answer: str
    figure: Files
    look_for: str
    full_size: str = ""
    more: tuple[Files, ...] = ()
    tools: tuple[Files, ...] = ()


MAZE_PAGE = Files("maze_page", (f"{ROOM}/page/index.html",),
                  "The maze page: draw mazes, and watch the agents' fields change")
ATTRIBUTIONS = Section(
    "attribution", "What are the outputs made of?",
    "The value is attributed to the activations of the agent's layers (integrated gradients), and "
    "the channels of each layer are reduced to a few features.",
    "{attribution_checks} of attributions to {attribution_features}.",
    Files("attribution_checks", (f"{ATTRIBUTION}/checks/deletion.png",),
          "The output as cells are deleted, or inserted, in the order of their attribution."),
    "Look for curves that fall (deletion) or rise (insertion) faster than the random order, and "
    "for signs that are right more often than by chance.",
    "Ablating a feature changes the value by a fifth of its attribution. Gradients through the "
    "simulator predict effects of objects on later values no better than maps of the agent alone; "
    "simulating without the object does.",
    (Files("attribution_checks", (f"{ATTRIBUTION}/checks/report.md", f"{ATTRIBUTION}/checks/*.png"),
           "All checks: completeness, deletion and insertion, objects removed from the real game.",
           3),
     Files("saliency_checks", (f"{ATTRIBUTION}/saliency_checks/report.md",
                               f"{ATTRIBUTION}/saliency_checks/checks.png"),
           "Which map predicts the game? Predictions of the agent alone and of the simulator, and "
           "the effects of objects that were removed from the real game."),
     Files("attribution_table", (f"{ATTRIBUTION}/table/table.md", f"{ATTRIBUTION}/table/*.png"),
           "Published findings, and what this agent shows.")),
    (Files("attribution_page", (f"{ATTRIBUTION}/page/index.html",),
           "The attribution page: walk through trajectories, feature by feature"),))
FAILURES = Section(
    "failures", "Why does it fail?",
    "To find the cause of a failed episode, its last step is repeated in a copy of the real game "
    "without the hazards of one kind. If the episode then continues, this kind is the cause. The "
    "same levels are played by the agent, by edited agents, with invisible hazards, and with "
    "random edits of the same size.",
    "{failure_causes}.",
    Files("failure_causes", (f"{ATTRIBUTION}/causes/causes.png",),
          "Failures by cause; grey: random edits."),
    "Look for a cause that becomes more frequent without the feature, beyond the grey range.",
    "With two features of its first block reversed, saws end 22 % of 400 levels instead of 4.5 %; "
    "with 20 random edits, at most 7.5 %.",
    (Files("failure_causes", tuple(f"{ATTRIBUTION}/causes/{name}" for name in (
        "report.md", "failures.png", "films/*.mp4")),
           "The report with all claims; the last frames of failed episodes; and films of levels "
           "that only one of two arms fails."),))
MEMORY = Section(
    "memory", "What is its memory for?",
    "The hidden state is reset, or swapped with that of another level, on recorded frames and in "
    "the real game. The preset memory also delays and freezes it, decodes labels of the level "
    "from it, pushes it along directions of these labels, and extracts sparse features. Controls "
    "change the state at random by the same amount.",
    "Lesions in the real game: {memory_lesions}.",
    Files("memory_lesions", (f"{MEMORY_ROOM}/lesions/kl.png",),
          "How much policy and value change, by steps since the state was changed."),
    "Look for curves above those of random changes (dotted), and compare how fast both fall: only "
    "a difference says something about what the state holds.",
    "In 82 recorded levels, a swap changes the policy for 6 steps, no longer than random changes. "
    "Of the value's change, 40 % are left after 16 steps (random changes: 20 to 30 %). With the "
    "initial state at every step, the agent solves 10 % of 100 levels instead of 96 %; no other "
    "lesion has a claimed effect on success.",
    (
        Files("memory_lesions", (f"{MEMORY_ROOM}/lesions/effects.png",
                                 f"{MEMORY_ROOM}/lesions/report.md"),
              "Success, return and failures with a changed state, in the real game."),
        Files("probe_atlas", tuple(f"{MEMORY_ROOM}/probe_atlas/{name}" for name in (
            "actions_ahead.png", "beyond_the_frame.png", "report.md")),
            "What probes decode, from the hidden state and from controls."),
        Files("probe_interventions", (f"{MEMORY_ROOM}/probe_interventions/effects.png",
                                      f"{MEMORY_ROOM}/probe_interventions/report.md"),
              "Pushes along probe directions, compared with random ones and with full swaps."),
        Files("sparse_features", (f"{MEMORY_ROOM}/sparse_features/dictionaries.png",
                                  f"{MEMORY_ROOM}/sparse_features/report.md"),
              "Sparse features, compared with other dictionaries."),
        Files("sparse_features", (f"{MEMORY_ROOM}/sparse_features/examples/*.png",),
              "Frames in which single features are most active.", 4),
        Files("feature_dreams", (f"{MEMORY_ROOM}/feature_dreams/dreams.md",),
              "Starts optimised to activate a feature, and whether it is active in the real game."),
        *(Files(f"patching_{unit}s", tuple(f"{PATCHING}/{unit}s/{name}" for name in (
            "circuits.png", "report.md")),
                f"Patches of single {unit}s, their first-order estimates, and circuits.")
          for unit in ("channel", "cell")),
        Files("memory_table", (f"{MEMORY_ROOM}/table/table.md", f"{MEMORY_ROOM}/table/*.png"),
              "Claims of the literature, and what this agent shows.")))
FEATURE_PANEL = Files("panel", (f"{FOLDERS.panel}/index.html",),
                      "The interpretability panel: a page per sparse feature, with examples, "
                      "effect and dream")
SECTIONS = (
    Section(
        "agent", "How well does the agent play?",
        "The agent learns by trial and error (PPO) to play levels that are generated for each "
        "episode. It sees frames of 64 × 64 pixels; its hidden state is all that it remembers.",
        "On levels that the agent did not see in training: {evaluate}.",
        Files("evaluate", (TRAINING_CURVE,),
              "Training curve of the analysed agent: return on training levels and on unseen ones; "
              "10 is a solved level."),
        "Look for a return on unseen levels that stays near the one on training levels.",
        more=(Files("render", ("videos/*_strip.png",), "Moments of an episode, with the actions."),
              Files("render", ("videos/*_person.mp4",), "Episodes on unseen levels.", 3),
              Files("plot_agent", ("agent/**/plot_for_fig.png",),
                    "Training curve of the agent that was trained in this run."))),
    Section(
        SIMULATOR_SECTION, "Does the simulator show the game?",
        "A differentiable copy of the environment, with the frozen agent inside, is trained on "
        "recorded episodes.",
        "Measured by image error on held-out episodes, the simulator {loss_over_time}.",
        Files("loss_over_time", ("loss_over_time/truth_above_imagination_*.png",),
              "Top: recorded frames. Bottom: frames imagined from the same start with the same "
              "actions."),
        "Look for objects at the same places as in the recording. Where a curve of the fidelity "
        "card meets that of the last frame, the simulator predicts no better than that frame.",
        "",  # read from the card of the shipped simulator, see ``page_of``
        (Files("loss_over_time", ("loss_over_time/truth_above_imagination_*.png",),
               "Further windows, recorded above imagined.", 4),
         Files("train_simulator", ("simulator/**/recons_v_preds/*.mp4",),
               "From left to right: truth, reconstruction, imagination.", newest=True),
         Files("simulate", ("samples/informed_init/videos/*.mp4",),
               "Rollouts imagined from recorded frames. Arrow: action; blue box: probability that "
               "the episode ends; green box: reward.", 3),
         Files("simulate_at_random", ("samples/rand_init/videos/*.mp4",),
               "Rollouts imagined from generated levels.", 3),
         Files("simulate_actions", ("samples/manual_actions/videos/start_*.mp4",),
               "One start, nine futures, each with another fixed action."),
         Files("loss_over_time", ("loss_over_time/fidelity_card.png", "loss_over_time/*plot.png"),
               "The fidelity card; losses; objects shown.", 2),
         Files("plot_simulator", ("simulator/**/plot.png",), "Training: each term of the loss."))),
    Section(
        "hidden", "What does the hidden state look like?",
        "The hidden states of all recorded steps, as a map in which neighbours stay neighbours "
        "(t-SNE), and along their principal and independent components.",
        "{hidden_states} of the hidden state.",
        Files("plot_hidden_states", tuple(f"{FOLDERS.hidden_state_plots}/{name}.png" for name in (
            "tsne_value", "tsne_action")), "Hidden states, coloured by value and by action."),
        "Look for colours that form regions: there, the hidden state tells values, actions or "
        "situations apart.",
        more=(Files("plot_hidden_states", tuple(f"{FOLDERS.hidden_state_plots}/{name}" for name in (
                  "variance_explained.png", "pca_value.png", "pca_cluster.png", "tsne_cluster.png",
                  "paths.png", "rotating_cluster.gif")),
                    "Explained variance, further maps, and trajectories of episodes."),
              Files("readout_weights", (f"{FOLDERS.readout}/value_weights.png",
                                        f"{FOLDERS.readout}/action_weights.png"),
                    "What each component does to the value and the actions in the same step.")),
        tools=(Files("panel", (f"{FOLDERS.panel}/index.html",),
                     "The interpretability panel: frames, saliency and components, step by "
                     "step"),)),
    Section(
        "saliency", "What in the frame raises the value, an action or a component?",
        "Gradients through the simulator show which pixels would have raised a function of the "
        "agent some steps later: its value, the log-probability of its action, or a direction of "
        "its hidden state. In saliency maps, blue raises and red lowers.",
        "{saliency}; 1 would mean that all functions have the same map.",
        Files("saliency", ("report/saliency_*.png",),
              "From top to bottom: what the agent sees, then the saliency of its value, of its "
              "action and of one direction."),
        "Look for colour on what matters in the game, such as obstacles and rewards, and for rows "
        "that differ: what all maps have in common is not specific to any function.",
        "With an earlier simulator, the map similarity was 0.74 at the first step and 0.43 at the "
        "step at which the functions are evaluated.",
        (Files("saliency", ("report/saliency_*.png",), "Further samples.", STRIP_SAMPLES),
         Files("saliency", ("samples/informed_init/sample_*/sample_*_saliency_value.mp4",),
               "Saliency of the value, as videos. Purple, with a spatial simulator: cells of its "
               "state on which the value depends.", 3),
         Files("saliency", (f"{FOLDERS.saliency_demonstration}/sample_*/*.mp4",),
               "Next to the frames: saliency with gradients through the environment, without, and "
               "the difference.", 2),
         Files("optimise_start", ("samples/made_to_order/penalty_1/videos/*.mp4",),
               "Starts that were optimised for a target. From left to right: the optimised start, "
               "and the nearest recorded start, simulated and as recorded.", 4),
         Files("optimise_start", ("samples/made_to_order/targets.png",
                                  "samples/made_to_order/report.md"),
               "Score of each target compared with the best recorded start, and what the real game "
               "shows."))),
    Section(
        "causes", "Which behaviours are there, and what influences what?",
        "Behaviours are clusters of simulated steps with similar states, and similar changes, of "
        "agent and environment. An influence between components is claimed if gradients and "
        "correlations agree in more samples than expected by chance.",
        "{behaviours} of behaviour; {consistency}.",
        Files("plot_behaviours", (f"{FOLDERS.behaviour_plots}/behaviours_overview.png",),
              "Behaviours: samples, steps and actions of each."),
        "Look for behaviours of many samples in which few actions prevail. Components that are "
        "correlated, but without a gradient, may have a common cause.",
        "In 300 samples of an earlier simulator, 13 of 160 influences of components on value and "
        "action are claimed, and 0 of 960 on other components. Behaviours agree between draws of "
        "the samples (adjusted Rand index 0.52; 0.23 with components permuted among samples).",
        (Files("behaviour_stability", (f"{FOLDERS.behaviour_stability}/behaviour_stability_*.md",),
               "Do other samples show the same behaviours?"),
         Files("causal_stories", (f"{FOLDERS.stories}/index.md",),
               "A page per behaviour, with what is claimed and what is not."),
         Files("correlations", (f"{FOLDERS.correlation_plots}/xcorr_all.png",
                                f"{FOLDERS.correlation_plots}/xcaus_all.png"),
               "Cross-correlation and cross-causation of the components, some steps apart."),
         Files("consistency", (f"{FOLDERS.comparison_plots}/all_t-1.png",),
               "Gradients and correlations one step apart, and where they agree."),
         Files("plot_env_states", (f"{FOLDERS.env_state_plots}/tsne_value.png",
                                   f"{FOLDERS.env_state_plots}/tsne_cluster.png"),
               "States of the simulated environment (t-SNE)."),
         Files("plot_bottleneck_vectors", (f"{FOLDERS.bottleneck_plots}/variance_spectrum.png",
                                           f"{FOLDERS.bottleneck_plots}/cosines.png"),
               "Start vectors from the encoder and random ones: how far from uniform are they?"),
         Files("plot_jacobians", (f"{FOLDERS.jacobian_plots}/tsne_*cluster.png",
                                  f"{FOLDERS.jacobian_plots}/variance_explained.png"),
               "Gradients of the components in each sample."))),
    Section(
        "interventions", "Which components does the agent need?",
        "The agent plays the same unseen levels with and without a component of its hidden state. "
        "An effect is claimed only if it is significant, and larger than the effects of moving "
        "the state as far along random directions.",
        "{interventions}.",
        Files("interventions", (f"{FOLDERS.interventions}/effects.png",),
              "Effects with 95 % intervals; grey: random directions."),
        "Look for intervals that exclude zero and lie beyond the grey range.",
        "Held at its mean, component 12 costs 58 points of success on 50 levels (44 to 72), and "
        "random changes that move the state as far cost 0 to 14. Component 8 costs 4 points, no "
        "more than its controls.",
        (Files("interventions", (f"{FOLDERS.interventions}/effects.md",), "All effects."),)),
    dataclasses.replace(
        ATTRIBUTIONS, title="What are its outputs made of, and why does it fail?",
        answer=f"{ATTRIBUTIONS.answer.removesuffix('.')}; {FAILURES.answer}",
        full_size=f"{ATTRIBUTIONS.full_size} {FAILURES.full_size}",
        more=(*ATTRIBUTIONS.more, FAILURES.figure, *FAILURES.more)))


@dataclasses.dataclass(frozen=True)
class Page:
    """Contents of the summary page of an experiment.

    Attributes:
        title: title of the browser window.
        heading: heading of the page.
        lead: introductory paragraph below the heading.
        analysed: sentence that names the analysed agents.
        sections: sections, in order.
        opening: videos at the top of the page.
        agent_file: agent whose training curve is drawn if its log is next to it; None for the
            agent that was trained in this run.
        is_small: whether to show the results of the full-size run as well.
    """

    title: str
    heading: str
    lead: str
    analysed: str
    sections: tuple[Section, ...]
    opening: tuple[Files, ...] = ()
    agent_file: str | None = None
    is_small: bool = False


OPENING = (
    Files("render", ("videos/*_person.mp4",), "The agent plays a level that it has not seen."),
    Files("train_simulator", ("simulator/**/recons_v_preds/*.mp4",),
          "Truth, reconstruction, and what the simulator imagines.", newest=True),
    Files("saliency", ("samples/informed_init/sample_*/sample_*_saliency_value.mp4",),
          "What raises (blue) and lowers (red) the agent's value, in an imagined rollout. Purple: "
          "size of the gradient in each cell of the simulator's state."))


def page_of(preset: AnyPreset) -> Page:
    """Return the summary page of an experiment with a preset."""
    if isinstance(preset, MazePreset):
        return Page(
            "what do maze agents want?", "What do maze agents want, and what steers them?",
            "Agents that learned to find cheese are studied in mazes: where they go when the "
            "cheese lies elsewhere, how their layers represent it, and how behaviour changes when "
            "this representation is changed.",
            "Analysed: " + ", ".join(
                f"{name} ({file})" for name, file in zip(preset.agents, preset.agent_files)) + ".",
            _maze_sections(preset))
    if isinstance(preset, AttributionPreset):
        return Page(
            "what are the agent's outputs made of?",
            "What are an agent's outputs made of, and are the attributions right?",
            "The agent's value is attributed to features of its layers, the attributions are "
            "checked by experiment in the real game, and features are removed to count the "
            "failures that this causes.",
            f"Analysed: {_which('agent', preset.agent_file)}.", (ATTRIBUTIONS, FAILURES))
    if isinstance(preset, MemoryPreset):
        return Page(
            "what does the agent's memory hold?",
            "What does the memory of an agent hold, and what is it for?",
            "The hidden state of a recurrent agent is lesioned, decoded, pushed, and decomposed "
            "into features. Effects on success are measured in the real game, on levels that were "
            "not used for fitting.",
            f"Analysed: {_which('agent', preset.agent_file)}.",
            (dataclasses.replace(MEMORY, tools=(FEATURE_PANEL,)),))
    extra = (*((MEMORY,) if preset.memory else ()), *((MAZES,) if preset.mazes else ()))
    sections = [dataclasses.replace(section, full_size=_simulator_finding())
                if section.anchor == SIMULATOR_SECTION else section for section in SECTIONS]
    return Page(
        "what does the agent's hidden state represent?",
        "What does the hidden state of an agent represent, and what causes its behaviour?",
        "An agent with memory was trained to play a game. Then a differentiable simulator of the "
        "game was trained, with the agent inside. Each section asks one question, and answers it "
        "with numbers of this run.",
        f"Analysed: {_which('agent', preset.agent_file)}, in "
        f"{_which('simulator', preset.model_file)}.",
        (*sections, *extra), OPENING, preset.agent_file,
        # This parameter set is too small for claims; the full-size results are of this agent.
        preset.parameters == "demo-minutes"
        and "pretrained/coinrun_hard/" in (preset.agent_file or ""))


def _simulator_finding() -> str:
    """Describe the card of the shipped simulator on the agent's own play, read from its file."""
    file = CARDS / "without_noise.csv"
    return card_finding(read_card(file), read_json(file.with_suffix(".json")), 5)


def _which(what: str, file: str | None) -> str:
    return f"the {what} {file}" if file else f"the {what} trained here"


def _maze_sections(preset: MazePreset) -> tuple[Section, ...]:
    sections = [Section(
        "findings", "Which published claims hold for these agents?",
        "The table has one row per published claim and one column per agent.", f"{{{TABLE}}}.",
        Files(TABLE, (f"{ROOM}/table/*.png",), "Effects of the tested rows."),
        "Look for claimed effects, and for tested effects that are not claimed.",
        more=(Files(TABLE, (f"{ROOM}/table/table.md",), "The table."),), tools=(MAZE_PAGE,))]
    for agent in preset.agents:
        folder = f"{ROOM}/{agent}"
        evaluated = f"{agent}_{claims.EVALUATED}_{claims.REGION}"
        sections.append(Section(
            agent, f"What does {agent} want?",
            "Arrows show where the agent goes from each square. Further figures show how often it "
            "gets the cheese and what predicts it, what vectors and channels do at decision "
            "squares, and where the mouse goes when a channel is set.",
            f"With the cheese in its region, {{{evaluated}}}.",
            Files(f"{agent}_fields", (f"{folder}/fields/*/field_*.png",),
                  "Fields without and with each level's own cheese vector.", 3),
            "Look for arrows that turn away from the cheese when its vector is subtracted, and for "
            "intervals beyond the grey range of the controls.",
            more=(
                Files(f"{agent}_rollouts", (f"{folder}/rollouts/*.mp4",),
                      "Unpatched, without the cheese vector, and with the vector to the corner.",
                      3),
                Files(f"{agent}_{claims.BEHAVIOUR}", (f"{folder}/behaviour/*.png",),
                      "Getting the cheese, by level and by feature.", 2),
                Files(f"{agent}_{claims.STEERING}", (f"{folder}/steering/coefficients.png",),
                      "The cheese vector by coefficient."),
                Files(f"{agent}_{claims.TOP_RIGHT}",
                      (f"{folder}/steering_top_right/coefficients.png",),
                      "The vector to the corner by coefficient."),
                Files(f"{agent}_{claims.CHANNELS}", (f"{folder}/channels/channels.png",),
                      "Tracking scores and probes."),
                Files(f"{agent}_{claims.RETARGETING}",
                      (f"{folder}/retargeting/*/retargeting.png",),
                      "Where the mouse goes if a cell of the strongest channel is set, and if the "
                      "cheese is moved.", 2),
                Files(f"{agent}_{claims.ALL_RETARGETING}",
                      (f"{folder}/retargeting_all/*/retargeting.png",),
                      "Where the mouse goes if a cell of all chosen channels is set."),
                Files(f"{agent}_{claims.SCRUBBING}", (f"{folder}/scrubbing/scrubbing.png",),
                      "Channels resampled from other levels."))))
    return tuple(sections)


MAZES = Section(
    "mazes", "What does a maze agent want?",
    "Another agent was trained with the cheese in one corner of the maze. Arrows show where it "
    "goes from each square: as it is, with the level's cheese vector subtracted or the vector to "
    "the corner added, and the difference.",
    "{maze_fields}.",
    Files("maze_fields", (f"{ROOM}/fields/*/field_*.png",), "Fields of levels that are forks.", 3),
    "Look for arrows that no longer turn to the cheese.",
    "Subtracting the cheese vector lowers the probability of turning to the cheese by 0.48 to 0.62 "
    "in three agents. Another level's vector has a similar effect only if that level's cheese is "
    "on the same square.",
    tools=(MAZE_PAGE,))
