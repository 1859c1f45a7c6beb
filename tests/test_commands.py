"""The command line: published flags and error messages of one sentence."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from conftest import PATIENCE, ROOT, refusal, start, tiny_policy, wait_for

import evaluate
import loss_over_time_experiment
import maze.table
import plot_training_csv
import plot_value_and_action_weights
import record
import record_gen_samples
import render
import saliency_experiments
import train
import train_gen_model
from agents.agent_file import AgentOrigin, save_agent
from agents.config import AgentConfig, load_agent_config
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.options import parse, parser_of
from generative.config import SimulatorConfig, TrainingConfig

TRAIN_FLAGS = shlex.split(
    "--exp_name e --env_name coinrun --start_level 3 --num_levels 1000000 "
    "--distribution_mode hard --param_name hard-rec --device cpu --gpu_device 0 "
    "--num_timesteps 200000000 --seed 6 --log_level 40 --num_checkpoints 500 "
    "--model_file m.pth --num_threads 8")


@pytest.mark.parametrize(("script", "more"), [
    (train, []), (render, ["--tps", "15", "--vid_dir", "v", "--num_eps", "10"]),
    (record, ["--logdir", "somewhere"])])
def test_every_flag_of_the_seeds_parses(script, more):
    args = parser_of(script.main.options).parse_args([*TRAIN_FLAGS, *more])
    assert (args.env_name, args.num_levels, args.distribution_mode) == ("coinrun", 10**6, "hard")
    assert str(args.agent_file) == "m.pth"
    assert args.seed == 6


@pytest.mark.parametrize(("script", "line"), [
    (train, "--exp_name trainhx_1Mlvls --env_name coinrun --param_name hard-rec --num_levels "
            "1000000 --distribution_mode hard --num_timesteps 200000000 --num_checkpoints 500"),
    (plot_training_csv, "--datapath=logs/procgen/coinrun/rec1M_reset/seed_7985_09-04"),
    (render, "--exp_name=trainhx_1Mlvls --env_name=coinrun --distribution_mode=hard "
             "--param_name=hard-local-dev-rec --device=cpu --model_file=logs/model_80412672.pth"),
    (record, "--model_file=./logs/model_80412672.pth --logdir=./ --env_name coinrun --param_name "
             "hard-rec-record --num_levels 1000000 --distribution_mode hard --num_checkpoints 200"),
    (record, "--exp_name recording_exp --env_name coinrun --param_name hard-rec --num_levels "
             "1000000 --distribution_mode hard --num_checkpoints 200 --model_file=m.pth "
             "--logdir=/cluster/scratch/")])
def test_published_commands_parse(script, line):
    parser_of(script.main.options).parse_args(line.split())


SIMULATOR_FLAGS = shlex.split(
    "--agent_file a.pth --model_file m.pt --interpreting_params_name demo --exp_name e --env_name "
    "coinrun --epochs 3 --start_level 0 --num_levels 9 --distribution_mode hard --device cpu "
    "--gpu_device 0 --seed 6 --log_level 40 --num_threads 8 --data_dir data/ --log_interval 10 "
    "--save_interval 10000 --batch_size 28 --num_sim_steps 28 --num_initializing_steps 3 --lr 1e-4 "
    "--loss_scale_obs 1000.0 --loss_scale_hx 1.0 --loss_scale_reward 0.01 --loss_scale_done 0.1 "
    "--loss_scale_act_log_probs 0.00001 --loss_scale_gen_adv 0. --loss_scale_kl 1.0")


@pytest.mark.parametrize("names", ["--gen_mod_exp_name dev --agent_param_name hard-rec",
                                   "--tgm_exp_name dev --param_name hard-rec"])
@pytest.mark.parametrize(("script", "more"), [
    (train_gen_model, ""), (loss_over_time_experiment, ""), (saliency_experiments, ""),
    (plot_value_and_action_weights, ""),
    (record_gen_samples, "--recording_rand_init --generated_data_dir g/ --data_save_dir d/ "
                         "--swap_directions_from 10 5 --swap_directions_to 12 None "
                         "--manual_action jump")])
def test_both_generations_of_simulator_flags_parse(script, more, names):
    argv = [*SIMULATOR_FLAGS, *names.split(), *more.split()]
    args = parse(script.main.options, argv)
    parameters = args.parameters
    assert args.gen_mod_exp_name == "dev"
    training, sizes = parameters.get(TrainingConfig), parameters.get(SimulatorConfig)
    assert (args.batch_size, training.lr) == (28, 1e-4)
    assert (sizes.num_init_steps, sizes.num_sim_steps) == (3, 28)
    assert sizes.bottleneck_vec_size == 2048  # from the parameter set
    if more:
        assert (args.swap_directions_from, args.swap_directions_to) == ((10, 5), (12, None))


@pytest.mark.parametrize("name", ["easy", "easy-200", "hard", "hard-500", "hard-500-mem",
                                  "hard-rec", "hard-rec-record", "hard-local-dev",
                                  "hard-local-dev-rec"])
def test_published_parameter_sets_have_the_published_values(name):
    envs = {"easy": 64, "easy-200": 128, "hard-rec-record": 128, "hard-local-dev": 16,
            "hard-local-dev-rec": 16}.get(name, 256)
    memory = 8192 if name.startswith(("hard-500", "hard-local")) else 2048
    assert load_agent_config(name) == AgentConfig(
        algo="ppo", architecture="impala", recurrent="-rec" in name, n_envs=envs, n_steps=256,
        epoch=3, mini_batch_per_epoch=8, mini_batch_size=memory, gamma=0.999, lmbda=0.95,
        use_gae=True, learning_rate=0.0005, grad_clip_norm=0.5, eps_clip=0.2, value_coef=0.5,
        entropy_coef=0.01, normalize_adv=True, normalize_rew=True, hidden_state_size=64,
        learned_initial_state=True)


@pytest.mark.parametrize(("argv", "words"), [
    (["--env_name", "coinrum"], "did you mean 'coinrun'"),
    (["--distribution_mode", "memory"], "coinrun has no distribution mode 'memory'"),
    (["--num_levels", "-1"], "--num_levels: must be a whole number from 0 to"),
    (["--exp_name", "../../x"], "--exp_name: must be the name of a folder, not '../../x'"),
    (["--start_level", "3"], "start_level needs num_levels"),
    (["--start_level", "9", "--num_levels", str(2**31 - 10)], "no unseen levels are left"),
    (["--model_file", "nowhere.pth"], "there is no agent file nowhere.pth"),
    (["--resume", "nowhere"], "no run to resume"),
    pytest.param(["--device", "gpu"], "needs a CUDA GPU", marks=pytest.mark.skipif(
        torch.cuda.is_available(), reason="needs a machine without a GPU"))])
def test_training_refuses_bad_input_and_writes_nothing(argv, words, tmp_path, capsys):
    message = refusal(train.main, ["--param_name", "tiny", "--num_timesteps", "512", "--logdir",
                                   tmp_path, *argv], capsys)
    assert words in message
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("error", [
    MemoryError(), MemoryError("Unable to allocate 3.00 TiB"),
    pytest.param(lambda: torch.empty(2**58, dtype=torch.uint8), id="torch")])
def test_too_little_memory_is_one_sentence(error, capsys):
    @script_main
    def main(argv=None):
        if callable(error):
            error()
        raise error

    assert "there is not enough memory" in refusal(main, [], capsys)


def test_a_link_to_itself_is_refused(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert "loop" in refusal(maze.table.main, ["--studies", tmp_path / "loop"], capsys)


PRINTS = """
import os, sys
from common.errors import script_main

@script_main
def main(argv=None):
    with open(sys.argv[1], "w") as file:
        os.write(2, b"a library's noise")
        print("a warning", file=sys.stderr)
        sys.stderr.isatty()
        print("a result")
        file.write("figures")

sys.exit(main())
"""


def test_what_is_printed_to_a_closed_stream_goes_nowhere(tmp_path):
    """Neither a file that is opened later with the stream's number nor the other stream gets it."""
    done = subprocess.run(["bash", "-c", 'exec "$@" >&- 2>&-', "bash", sys.executable, "-c", PRINTS,
                           tmp_path / "log.csv"], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "log.csv").read_text() == "figures"


@pytest.mark.parametrize(("redirection", "reason"), [
    ("> /dev/full", "No space left on device"), ("| true", "Broken pipe")])
@pytest.mark.parametrize("lines", [1, 10_000], ids=["at the end", "while it runs"])
def test_output_that_cannot_be_written_is_one_sentence(redirection, reason, lines):
    """Python flushes the standard output at exit, and would print "Exception ignored"."""
    code = f"""
import sys, time
from common.errors import script_main

@script_main
def main(argv=None):
    time.sleep(0.5)  # until the other end of the pipe is closed
    print("a line\\n" * {lines}, end="")

sys.exit(main())
"""
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}', "bash", sys.executable, "-c",
         code], cwd=ROOT, text=True, stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"})
    assert done.returncode == 2
    assert re.fullmatch(rf"error: cannot read or write( \(standard output\))?: {reason}\n",
                        done.stderr)


@pytest.mark.parametrize(("changes", "words"), [
    ({"fc_value.bias": None}, "no tensor 'fc_value.bias'"),
    ({"attention.weight": torch.zeros(2)}, "'attention.weight', which agents of this"),
    ({"fc_value.bias": "0.5"}, "'fc_value.bias' is not a tensor"),
    ({"fc_policy.weight": torch.zeros(9, 64)},
     "has the shape (9, 64), not (15, 64); a head of 9 actions acts in a reduced action set"),
    ({"fc_policy.weight": torch.zeros(15, 9)}, "has the shape (15, 9), not (15, 64)"),
    ({"embedder.block2.conv.weight": torch.zeros(32, 3, 3, 3)},
     "'embedder.block2.conv.weight' has the shape (32, 3, 3, 3), not (8, 4, 3, 3)"),
    ({"embedder.fc.weight": None}, "is not an IMPALA, Nature or clear agent"),
    (None, "model_1.pth")])
def test_unusable_model_file_is_named(changes, words, agent_path, tmp_path, capsys):
    path = tmp_path / "model_1.pth"
    if changes is None:
        path.write_bytes(agent_path.read_bytes()[:100_000])
    else:
        content = torch.load(agent_path, weights_only=True)
        state = {**content["model_state_dict"], **changes}
        content["model_state_dict"] = {key: tensor for key, tensor in state.items()
                                       if tensor is not None}
        torch.save(content, path)
    output = tmp_path / "output"
    assert words in refusal(record.main, ["--model_file", path, "--logdir", output], capsys)
    assert not output.exists()


@pytest.mark.parametrize(("save", "words"), [
    (lambda path: torch.save(torch.nn.Linear(2, 2), path),
     "a whole pickled module or object (torch.nn.modules.linear.Linear), which would run code"),
    (lambda path: torch.jit.script(torch.nn.Linear(2, 2)).save(path), "a TorchScript archive"),
    (lambda path: joblib.dump({"params": np.zeros(3)}, path),
     "a joblib file: python -m attribution.published converts")])
def test_agent_files_of_other_programs_are_recognised(save, words, tmp_path, capsys):
    path = tmp_path / "agent"
    save(path)
    assert words in refusal(evaluate.main, ["--agent_file", path], capsys)


@pytest.mark.parametrize(("origin", "flags", "warning"), [
    (AgentOrigin(), [], "{} does not say how the agent was trained, so this is assumed: the game "
                        "coinrun, the mode easy, no backgrounds; to choose, give --env_name and "
                        "--distribution_mode and --use_backgrounds or --no_backgrounds"),
    (AgentOrigin(env_name="maze"), ["--no_backgrounds"],
     "{} does not say how the agent was trained, so this is assumed: the mode easy; to choose, "
     "give --distribution_mode"),
    (AgentOrigin(env_name="maze", distribution_mode="hard", use_backgrounds=True),
     ["--env_name", "heist"], "{} was trained in maze, so this is assumed: the mode easy, no "
                              "backgrounds; to choose, give --distribution_mode and "
                              "--use_backgrounds or --no_backgrounds"),
    (AgentOrigin(env_name="maze", distribution_mode="hard", use_backgrounds=True), [], None),
    (AgentOrigin(), ["--env_name", "maze", "--distribution_mode", "easy", "--no_backgrounds"],
     None)])
def test_assumptions_about_an_agents_training_are_named(origin, flags, warning, tmp_path, caplog):
    path = tmp_path / "model.pth"
    save_agent(path, tiny_policy(), origin=origin)
    parse(evaluate.EvaluateOptions, ["--agent_file", str(path), *flags]).env_config(path)
    assert caplog.messages == ([] if warning is None else [warning.format(path)])


def test_model_file_of_another_size_is_refused_by_training(agent_path, tmp_path, capsys):
    message = refusal(train.main, ["--param_name", "easy", "--model_file", agent_path, "--logdir",
                                   tmp_path / "logs"], capsys)
    assert str(agent_path) in message and "'embedder.block1.conv.weight'" in message
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("old", "new", "words"), [
    ("  gamma: 0.999", "  gama: 0.999", "unknown key 'gama' (did you mean 'gamma'?)"),
    ("  gamma: 0.999", "", "the key 'gamma' is missing"),
    ("  gamma: 0.999", "  gamma: 1.5", "gamma must lie between 0 and 1"),
    ("  learning_rate: 0.0005", "  learning_rate: .nan", "learning_rate must be above 0"),
    ("  mini_batch_per_epoch: 8", "  mini_batch_per_epoch: 7", "must be a multiple"),
    ("easy:\n", "easy: [\n", "is not valid YAML")])
def test_wrong_yaml_is_named(old, new, words, tmp_path):
    path = tmp_path / "config.yml"
    text = (ROOT / "hyperparams" / "procgen" / "config.yml").read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=re.escape(words)):
        load_agent_config("hard-rec", path)


@pytest.mark.slow
def test_full_disk_is_one_sentence_and_leaves_no_part(agent_path, tmp_path):
    """A limit of the file size, in KiB, simulates a full disk."""
    argv = ["record.py", "--param_name", "tiny", "--env_name", "fruitbot", "--seed", "1",
            "--logdir", tmp_path, "--num_episodes", "1", "--no_videos", "--model_file", agent_path]
    result = subprocess.run(["bash", "-c", 'ulimit -f 400; exec "$@"', "bash", sys.executable,
                             *map(str, argv)], cwd=ROOT, text=True, capture_output=True)
    assert result.returncode == 2, result.stderr
    assert re.search(r"cannot read or write \(.*/episode_\d+\): .*; \d+\.\d+ MB are free",
                     result.stderr.splitlines()[-1])
    assert "Traceback" not in result.stderr
    assert not [*tmp_path.rglob("*partial*"), *tmp_path.rglob("*.pth")]


def test_interrupt_is_no_error(agent_path, tmp_path):
    process = start("render.py", "--model_file", str(agent_path), "--vid_dir", str(tmp_path),
                    "--env_name", "fruitbot", "--num_eps", "1000")
    wait_for((tmp_path / "rendering.json").exists, process)  # written before the first episode
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE)[1].splitlines()[-1] == "stopped"
    assert process.returncode == 130


def test_precision_follows_the_machine_unless_chosen():
    assert not resolve_compute("cpu", precision="float32").bfloat16
    assert resolve_compute("cpu", precision="bfloat16").bfloat16
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    bfloat16 = {"amx_bf16", "avx512_bf16"} & set(flags[1].split())
    assert resolve_compute("cpu").bfloat16 == bool(bfloat16)


def commands_of_documents():
    """Yield every command line of README.md, docs/ and the model cards, as a list of words."""
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
                     *sorted((ROOT / "pretrained").glob("*/README.md"))):
        for line in document.read_text().replace("\\\n", " ").splitlines():
            if re.match(r"(    )?(python|torchrun|sbatch|COMMAND=\S+) [-\w./]+ ", line):
                words = shlex.split(line.partition(" < ")[0], comments=True)
                if words[0].startswith("COMMAND="):  # LSF job
                    words = ["bsub", *shlex.split(words[0].removeprefix("COMMAND="))]
                yield words


def test_scripts_accept_every_documented_command():
    """Flags and values are parsed; files need not exist."""
    num_commands = 0
    for words in commands_of_documents():
        begin = next(k for k, word in enumerate(words) if word == "-m" or word.endswith(".py"))
        name, argv = words[begin], words[begin + 1:]
        if name == "-m":
            name, *argv = argv
        script = importlib.import_module(name.removesuffix(".py").replace("/", "."))
        parser_of(script.main.options).parse_args(argv)
        num_commands += 1
    assert num_commands > 100


def heading_anchors(document):
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_documents_name_files_and_headings_that_exist():
    """This covers modules and YAML files in code font, and targets of links."""
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"),
                     *(ROOT / "pretrained").glob("*/README.md")):
        text = document.read_text()
        for name in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|yml))`", text):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
        for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
            path = document.parent / link if link else document
            assert path.exists(), f"{document.name} names {path}"
            assert not anchor or anchor in heading_anchors(path), f"{document.name}: #{anchor}"


def test_commands_of_different_documents_write_to_different_folders():
    """Otherwise, the second command fails, or continues with the output of the first."""
    found = {}
    for words in commands_of_documents():
        folders = [words[k + 1] for k, word in enumerate(words) if word == "--output_dir"]
        for folder in folders:
            earlier = found.setdefault((*words[1:3], folder), words)
            assert earlier == words, folder
    assert len(found) > 5
