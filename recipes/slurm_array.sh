#!/bin/bash
# The same without Python: sbatch --array=1-20 recipes/slurm_array.sh inspect MODEL --text corpus.txt
# Then: manyheads merge out/parts
#SBATCH --job-name=manyheads
#SBATCH --time=01:00:00
#SBATCH --cpus-per-task=4
set -euo pipefail
: "${SLURM_ARRAY_TASK_ID:?start this with sbatch --array=1-20}"
count="${SLURM_ARRAY_TASK_MAX:?start this with sbatch --array=1-20}"
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-4}"
exec "${MANYHEADS:-manyheads}" "$@" --shard "${SLURM_ARRAY_TASK_ID}/${count}" --out "${OUT:-out/parts}"
