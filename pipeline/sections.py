"""The pages that tie experiments together: their sections, and what each shows.
"""

from __future__ import annotations

import dataclasses

from maze.studies import results
from pipeline.attribution_stages import ROOM as ATTRIBUTION
from pipeline.maze_stages import ROOM, TABLE
from pipeline.presets import AnyPreset, AttributionPreset, MazePreset
from pipeline.stages import FOLDERS

STRIP_SAMPLES = 3
MAZE_PAGE_CAPTION = ("Edit a maze and see what the agents do in it, with and without patches; it "
                     "opens in the browser, from disk.")


@dataclasses.dataclass(frozen=True)
class Files:
    """Files of a stage that a section shows; Markdown becomes a page of the report.

    Attributes:
        stage: that writes them.
        patterns: in the output folder; the first files of each are shown.
        caption: what is to be seen.
        limit: at most so many of each pattern.
        newest: show the last ones instead of the first.
    """

    stage: str
    patterns: tuple[str, ...]
    caption: str
    limit: int = 1
    newest: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page: a question, and the files that answer it.

    Attributes:
        answered_by: the stage whose result is beside the title at the head of the page.
        text: what was asked and done.
        look_for: how to read what is shown.
        parts: what is shown.
    """

    anchor: str
    title: str
    answered_by: str
    text: str
    look_for: str
    parts: tuple[Files, ...]


ATTRIBUTION_SECTIONS = (
    Section("attribution", "What the outputs are made of", "attribution_features", (
        "The value is attributed to the activations of the agent's layers (integrated gradients), "
        "and the channels of each layer are reduced to a few features. The page walks through "
        "trajectories and shows what raised or lowered the value at each step, and by how much the "
        "attributions miss it."), (
        "Look for features whose examples show one thing, and for what the value was made of "
        "before and after a step at which it jumps."), (
        Files("attribution_page", (f"{ATTRIBUTION}/page/index.html",), "It opens in the browser, "
              "from disk."),
        Files("attribution_checks",
              (f"{ATTRIBUTION}/checks/report.md", f"{ATTRIBUTION}/checks/*.png"),
              "Are the attributions right? Cells deleted in their order, and objects taken out of "
              "the real game.", 2),
        Files("saliency_checks", (f"{ATTRIBUTION}/saliency_checks/report.md",
                                  f"{ATTRIBUTION}/saliency_checks/checks.png"),
              "Maps through the simulator beside attributions to layers: which is right more often "
              "about the real game?"),
        Files("attribution_table", (f"{ATTRIBUTION}/table/table.md", f"{ATTRIBUTION}/table/*.png"),
              "What the article found, and what this agent shows."))),
    Section("failures", "What the agent fails by", "failure_causes", (
        "Each failed episode has a cause: the hazard without which its last step, repeated in a "
        "copy of the real game, would not have ended it. The same levels are played by the agent, "
        "with features of it taken out, with a hazard made invisible, and with random edits of "
        "the same size."), (
        "Look for a cause that becomes more frequent without the feature, beyond the grey range "
        "of the random edits, and for how much of it an invisible hazard does."), (
        Files("failure_causes", (f"{ATTRIBUTION}/causes/causes.png",
                                 f"{ATTRIBUTION}/causes/report.md",
                                 f"{ATTRIBUTION}/causes/failures.png",
                                 f"{ATTRIBUTION}/causes/films/*.mp4"),
              "Failures by cause; what may be claimed; how some episodes ended; and a level that "
              "only one of two arms fails, if there is any."),)),
)
SECTIONS = (
    Section("agent", "The agent", "evaluate", (
        "An agent with a memory learns by trial and error (PPO) to play levels that are generated "
        "for each episode. It sees frames of 64 x 64 pixels, and its hidden state is what it "
        "remembers."), (
        "Look for a return on unseen levels that rises with that on training levels and stays "
        "near it, and for episodes in which the agent makes for its goal."), (
        Files("plot_agent", ("agent/**/plot_for_fig.png",),
              "Training curve: the return on levels it trains on and on levels it never saw."),
        Files("render", ("videos/*_strip.png",), "Moments of one episode of the agent that is "
              "analysed below; the mark shows the action."),
        Files("render", ("videos/*_person.mp4",), "Episodes on levels it has not seen.", 3))),
    Section("simulator", "The simulator", "simulate", (
        "A differentiable copy of the environment, with the agent frozen inside, is trained on "
        "recorded episodes. Once it is good enough, one can ask by gradients what caused what."), (
        "Look for imagined objects that stay where the truth has them, and for nine futures "
        "that differ as the forced actions do."), (
        Files("plot_simulator", ("simulator/**/plot.png",), "Training: each term of the loss."),
        Files("train_simulator", ("simulator/**/recons_v_preds/*.mp4",),
              "From left to right: the truth, its reconstruction, and what the simulator imagines "
              "from a few first frames and the actions.", newest=True),
        Files("simulate", ("samples/informed_init/videos/*.mp4",), "Rollouts imagined from "
              "recorded frames. Arrow: action; blue box: probability that the episode ends; green "
              "box: reward.", 3),
        Files("simulate_at_random", ("samples/rand_init/videos/*.mp4",),
              "Rollouts imagined from nowhere.", 3),
        Files("simulate_actions", ("samples/manual_actions/videos/start_*.mp4",),
              "One start, nine futures: each action is forced where it points."))),
    Section("loss", "How long imagination stays true", "loss_over_time", (
        "The loss on held-out episodes against the simulated step, beside three predictors that "
        "any simulator must beat: the last frame, the mean frame, and itself with the actions of "
        "another episode."), (
        "Look for a curve of the simulator below all others: where it meets one of them, its "
        "images say no more than that predictor's."), (
        Files("loss_over_time", ("loss_over_time/*plot.png",), "Each kind of loss."),
        Files("loss_over_time", ("loss_over_time/fidelity_card.png",),
              "The fidelity card: measures that other world models report, too."),
        Files("loss_over_time", ("loss_over_time/truth_above_imagination_*.png",),
              "Above: recorded frames. Below: imagined ones.", 3))),
    Section("hidden", "What the hidden state looks like", "hidden_states", (
        "The hidden states of all recorded steps, seen along their principal and independent "
        "components, and as a map in which neighbours stay neighbours (t-SNE)."), (
        "Look for colours that form regions: there the hidden state tells values, actions or "
        "situations apart, and mixed colours mean that it does not."), (
        Files("plot_hidden_states", (f"{FOLDERS.hidden_state_plots}/variance_explained.png",),
              "How many components hold how much of the variance."),
        Files("plot_hidden_states", tuple(f"{FOLDERS.hidden_state_plots}/{name}.png" for name in (
            "pca_value", "pca_cluster", "tsne_value", "tsne_cluster", "tsne_action", "paths")),
              "Embeddings; the title of each says what its colours are."),
        Files("plot_hidden_states", (f"{FOLDERS.hidden_state_plots}/rotating_cluster.gif",),
              "Three components, turning."))),
    Section("saliency", "What raises value, actions and directions", "saliency", (
        "Gradients through the simulator say which pixels, had they been different, would have "
        "raised a number that is read off the agent some steps later: its value, the chance of "
        "its action, a direction of its hidden state. Blue raises, red lowers."), (
        "Look for colour on what matters in the game, such as obstacles and rewards, and for "
        "rows that differ: a map shows what its own function depends on only as far as it differs "
        "from the others. The mean |r| between maps of different functions, printed under \"How it "
        "was made\", would be 1 if they were all one map."), (
        Files("saliency", ("report/saliency_*.png",), "From top to bottom: what the agent sees, "
              "then the saliency of its value, of its action and of one direction.",
              STRIP_SAMPLES),
        Files("saliency", ("samples/informed_init/sample_*/sample_*_saliency_value.mp4",),
              "Saliency of the value, as films.", 3),
        Files("saliency", (f"{FOLDERS.saliency_demonstration}/sample_*/*.mp4",),
              "Beside the frames: saliency with gradients through the environment, without, and "
              "the difference.", 2))),
    Section("optimised", "Starts made to order", "optimise_start", (
        "The vector from which a simulation starts is searched by gradient for rollouts that raise "
        "the value, or a direction of the hidden state, as far as possible: near recorded starts, "
        "and without this bound. Beside each: the recorded frames that are nearest."), (
        "Look for what the found rollouts have in common with the recorded frames beside them, and "
        "for what the real game shows from there."), (
        Files("optimise_start", ("samples/made_to_order/penalty_1/videos/*.mp4",),
              "From left to right: made to order, the nearest recorded start simulated, and as it "
              "was recorded.", 4),
        Files("optimise_start", ("samples/made_to_order/targets.png",),
              "Score of each target beside that of the best recorded start, and what the real game "
              "shows."),
        Files("optimise_start", ("samples/made_to_order/report.md",), "What was counted."))),
    Section("states", "Environment, behaviours, starts", "behaviours", (
        "The same maps of the simulated environment's states, of behaviours (clusters of what "
        "agent and environment do together), of the vectors from which simulations start, and of "
        "how the components of the hidden state depend on earlier states."), (
        "Look for behaviours of many samples in which few actions prevail, and for regions of "
        "one colour in the maps."), (
        Files("plot_env_states", (f"{FOLDERS.env_state_plots}/tsne_value.png",
                                  f"{FOLDERS.env_state_plots}/tsne_cluster.png"),
              "States of the simulated environment (t-SNE)."),
        Files("plot_behaviours", (f"{FOLDERS.behaviour_plots}/behaviours_overview.png",),
              "Behaviours: samples, steps and actions of each."),
        Files("plot_bottleneck_vectors", (f"{FOLDERS.bottleneck_plots}/variance_spectrum.png",
                                          f"{FOLDERS.bottleneck_plots}/cosines.png"),
              "Vectors that the encoder gives, beside random ones: how far from uniform they are."),
        Files("plot_jacobians", (f"{FOLDERS.jacobian_plots}/tsne_*cluster.png",
                                 f"{FOLDERS.jacobian_plots}/variance_explained.png"),
              "Gradients of the components in each sample (t-SNE), and their variance."))),
    Section("causes", "What causes what", "consistency", (
        "Correlation says what goes together; gradients through the simulator say what brings "
        "about what. An influence is claimed where both agree, sample by sample, beyond chance."), (
        "Look for pairs that are strong in both pictures with the same sign; what is strong "
        "in the correlations alone may have a common cause."), (
        Files("correlations", (f"{FOLDERS.correlation_plots}/xcorr_all.png",
                               f"{FOLDERS.correlation_plots}/xcaus_all.png"),
              "Cross-correlation of the components some steps apart, and cross-causation."),
        Files("consistency", (f"{FOLDERS.comparison_plots}/all_t-1.png",),
              "Gradients beside correlations, and where they agree, one step apart."),
        Files("readout_weights", (f"{FOLDERS.readout}/value_weights.png",
                                  f"{FOLDERS.readout}/action_weights.png"),
              "What each component does to the value and to the actions."),
        Files("causal_stories", (f"{FOLDERS.stories}/index.md",),
              "Causal stories: a page a behaviour, with what is claimed and what is not."))),
    Section("interventions", "What changes when a direction is altered", "interventions", (
        "The agent plays the same unseen levels with and without a direction of its hidden state. "
        "An effect is claimed only if it is clear in itself and larger than those of random "
        "directions of equal size."), (
        "Look for intervals that leave out zero and lie beyond the grey of the random "
        "directions."), (
        Files("interventions", (f"{FOLDERS.interventions}/effects.png",),
              "Effects with their 95 % intervals; grey: random directions."),
        Files("interventions", (f"{FOLDERS.interventions}/effects.md",),
              "All effects, and what may be claimed."))),
    Section("panel", "The interpretability panel", "panel", (
        "Scrub through simulated rollouts while seeing what the agent sees, what its hidden state "
        "does and what caused it."), (
        "Look for steps at which a component moves, and for what the saliency marks at the "
        "steps before."), (
        Files("panel", (f"{FOLDERS.panel}/index.html",), "It opens in the browser, from disk."),)),
    *ATTRIBUTION_SECTIONS)


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of an experiment.

    Attributes:
        title: of the window.
        heading: at its head.
        lead: a paragraph below it.
        analysed: sentences on what is analysed.
        sections: in order.
    """

    title: str
    heading: str
    lead: str
    analysed: str
    sections: tuple[Section, ...]


def page_of(preset: AnyPreset) -> Page:
    """The page of an experiment with this preset."""
    if isinstance(preset, MazePreset):
        return Page(
            "what do agents in mazes want?", "What do agents in mazes want, and what steers them?",
            "Agents that learned to find cheese are looked at in mazes: where they go when it lies "
            "where it never lay, what at their layers stands for it, and what becomes of their way "
            "when that is changed.",
            "Analysed below: " + ", ".join(
                f"{name} ({file})" for name, file in zip(preset.agents, preset.agent_files)) + ".",
            _maze_sections(preset))
    if isinstance(preset, AttributionPreset):
        return Page(
            "what are the agent's outputs made of?",
            "What are an agent's outputs made of, and is it true?",
            "An agent's value is attributed to features of its layers, the attributions are "
            "checked by experiment in the real game, and features are taken out to see what the "
            "agent then fails by.",
            f"Analysed below: {_which('agent', preset.agent_file)}.", ATTRIBUTION_SECTIONS)
    analysed = (f"Analysed below: {_which('agent', preset.agent_file)}, in "
                f"{_which('simulator', preset.model_file)}.")
    if (preset.agent_file and preset.model_file
            and preset.agent_training is not None and preset.simulator_training is not None):
        analysed += (" The two training curves are those of a short training that shows how such "
                     "are made.")
    return Page(
        "what does the agent's memory represent?",
        "What does the hidden state of an agent represent, and what causes its behaviour?",
        "An agent with a memory was trained to play a game, then a differentiable simulator of "
        "that game with the agent inside. This page shows, step by step, what gradients through "
        "the simulator say about the agent.", analysed,
        SECTIONS if preset.mazes is None else (*SECTIONS, PIECE_OF_MAZES))


def _which(what: str, file: str | None) -> str:
    return f"the {what} {file}" if file else f"the {what} trained here"


def _maze_sections(preset: MazePreset) -> tuple[Section, ...]:
    sections = [Section(
        "findings", "What was published, and what these agents show", TABLE,
        "A row a published claim, a column an agent.",
        "Look for rows that say claimed, and for those that do not: nulls are results.",
        (Files(TABLE, (f"{ROOM}/table/table.md", f"{ROOM}/table/*.png"),
               "The table, and the effects of the rows that are tested."),
         Files("maze_page", (f"{ROOM}/page/index.html",), MAZE_PAGE_CAPTION)))]
    for agent in preset.agents:
        folder = f"{ROOM}/{agent}"
        sections.append(Section(
            agent, f"The agent {agent}", f"{agent}_{results.EVALUATED}_{results.REGION}",
            "Arrows: where the agent goes from each square. Then how often it gets the cheese and "
            "what predicts it, what vectors and channels do at decision squares, and where the "
            "mouse goes when a channel is set.",
            "Look for arrows that turn away from the cheese when its vector is taken out, and for "
            "intervals beyond the grey of the controls.",
            (Files(f"{agent}_fields", (f"{folder}/fields/*/field_*.png",),
                   "Fields without and with each level's own vector.", 3),
             Files(f"{agent}_rollouts", (f"{folder}/rollouts/*.mp4",),
                   "Unpatched, without the cheese vector, and with the vector to the corner.", 3),
             Files(f"{agent}_{results.BEHAVIOUR}", (f"{folder}/behaviour/*.png",),
                   "Getting the cheese, by level and by feature.", 2),
             Files(f"{agent}_{results.STEERING}", (f"{folder}/steering/coefficients.png",),
                   "The cheese vector by coefficient."),
             Files(f"{agent}_{results.TOP_RIGHT}",
                   (f"{folder}/steering_top_right/coefficients.png",),
                   "The vector to the corner by coefficient."),
             Files(f"{agent}_{results.CHANNELS}", (f"{folder}/channels/channels.png",),
                   "Tracking scores and probes."),
             Files(f"{agent}_{results.RETARGETING}", (f"{folder}/retargeting/*/retargeting.png",),
                   "Where the mouse goes with a cell of the strongest channel set, and with the "
                   "cheese moved.", 2),
             Files(f"{agent}_{results.ALL_RETARGETING}",
                   (f"{folder}/retargeting_all/*/retargeting.png",),
                   "Where the mouse goes with a cell of all chosen channels set."),
             Files(f"{agent}_{results.SCRUBBING}", (f"{folder}/scrubbing/scrubbing.png",),
                   "Channels resampled from other levels."))))
    return tuple(sections)


PIECE_OF_MAZES = Section(
    "mazes", "An agent in mazes", "maze_fields",
    "Another agent, trained with the cheese in one corner of the maze. Arrows: where it goes from "
    "each square; beside them with each level's cheese vector taken out, or the vector to the "
    "corner added, and the difference.",
    "Look for arrows that no longer turn to the cheese.",
    (Files("maze_fields", (f"{ROOM}/fields/*/field_*.png",), "Fields of forks.", 3),
     Files("maze_page", (f"{ROOM}/page/index.html",), MAZE_PAGE_CAPTION)))
