#!/bin/bash
# Run a script of the repository root as an LSF job, submitted from the root. The job builds .venv
# first if necessary.
#
#   COMMAND="run_pipeline.py --preset full" bsub < jobs/lsf.sh
#   COMMAND="train_gen_model.py --agent_file ..." bsub -W 4:00 < jobs/lsf.sh
#   PROCESSES=4 COMMAND="train.py ..." bsub -gpu "num=4" < jobs/lsf.sh      one process per GPU
#   COMMAND="saliency_experiments.py ..." bsub -J "saliency[1-8]" < jobs/lsf.sh  one shard per job
#   SHARDS=8 COMMAND="..." bsub -J "saliency[3,5]" < jobs/lsf.sh            repeats two shards
#
# Ten minutes before the end, LSF sends SIGTERM; the script saves and stops with exit status 143. To
# continue, submit run_pipeline.py and saliency_experiments.py unchanged, and train.py and
# train_gen_model.py with --resume.
#BSUB -J interpret
#BSUB -o logs/%J-%I.out
#BSUB -W 23:59
#BSUB -n 8
#BSUB -R "span[hosts=1] rusage[mem=4096]"
#BSUB -gpu "num=1"
#BSUB -wa TERM
#BSUB -wt 10
set -eu
cd "$LS_SUBCWD"
flock Makefile make .venv/installed  # jobs that start together build it once
eval "set -- $COMMAND"
if [ "${LSB_JOBINDEX:-0}" != 0 ]; then
    set -- "$@" --shard "$LSB_JOBINDEX/${SHARDS:-$LSB_JOBINDEX_END}"
fi
if [ "${PROCESSES:-1}" -gt 1 ]; then
    # torchrun kills processes this many seconds after the signal that asks them to stop.
    exec .venv/bin/python -m torch.distributed.run --standalone --nproc_per_node "$PROCESSES" \
        --shutdown_timeout 540 "$@"
fi
exec .venv/bin/python "$@"
