#!/bin/bash
# Train on four nodes of a SLURM cluster, one process per GPU: sbatch examples/slurm.sh photos/captions.csv
# Submitted again, the same command continues the run where the last job ended.
#SBATCH --job-name=clipctl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120

runs=${RUNS:-$HOME/runs} name=${NAME:-clipctl}
if [ -e "$runs/$name/config.yaml" ]; then
    set -- --resume "$name"
else
    set -- "$@" --name "$name"
fi

# --signal asks for the end two minutes before the time is up; torchrun by itself would leave clipctl 30 s to save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

exec srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first_node:29500" \
    --max-restarts 3 \
    -m clipctl train "$@" --runs-dir "$runs"
