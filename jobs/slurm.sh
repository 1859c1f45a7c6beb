#!/bin/bash
# Run a script of the repository root as a Slurm job, submitted from the root. The job builds .venv
# first if necessary.
#
#   sbatch jobs/slurm.sh run_pipeline.py --preset full
#   sbatch --time 4:00:00 --gpus 1 jobs/slurm.sh train_gen_model.py --agent_file ...
#   PROCESSES=4 sbatch --gpus 4 jobs/slurm.sh train.py ...           one process per GPU
#   sbatch --array 1-8 jobs/slurm.sh saliency_experiments.py ...     one shard per job
#   SHARDS=8 sbatch --array 3,5 jobs/slurm.sh ...                    repeats two shards
#
# Ten minutes before the end, Slurm sends SIGTERM; the script saves and stops with exit status 143.
# To continue, submit run_pipeline.py and saliency_experiments.py unchanged, and train.py and
# train_gen_model.py with --resume.
#SBATCH --job-name interpret
#SBATCH --output logs/%x-%j.out
#SBATCH --time 24:00:00
#SBATCH --gpus 1
#SBATCH --cpus-per-task 8
#SBATCH --mem 32G
#SBATCH --signal B:TERM@600
set -eu
cd "$SLURM_SUBMIT_DIR"
flock Makefile make .venv/installed  # jobs that start together build it once
if [ -n "${SLURM_ARRAY_TASK_COUNT:-}" ]; then
    set -- "$@" --shard "$SLURM_ARRAY_TASK_ID/${SHARDS:-$SLURM_ARRAY_TASK_COUNT}"
fi
if [ "${PROCESSES:-1}" -gt 1 ]; then
    # torchrun kills processes this many seconds after the signal that asks them to stop.
    exec .venv/bin/python -m torch.distributed.run --standalone --nproc_per_node "$PROCESSES" \
        --shutdown_timeout 540 "$@"
fi
exec .venv/bin/python "$@"
