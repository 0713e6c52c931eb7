# shellcheck shell=bash
# Each variable is below its reason and, in brackets, its source.

# threads of one rank: the CPU cores of its task
export OMP_NUM_THREADS="1"
# compute nodes have no internet: Hugging Face libraries must not wait for it
export HF_HUB_OFFLINE="1"
# as HF_HUB_OFFLINE, for datasets
export HF_DATASETS_OFFLINE="1"
# compiled kernels on the node's own disk: thousands of ranks must not lock files of a shared one
export TRITON_CACHE_DIR="/tmp/$USER-triton-$SLURM_JOB_ID"
# as TRITON_CACHE_DIR, for torch.compile
export TORCHINDUCTOR_CACHE_DIR="/tmp/$USER-inductor-$SLURM_JOB_ID"
# the log shows a line when it is printed
export PYTHONUNBUFFERED="1"
