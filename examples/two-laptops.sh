#!/bin/bash
# Train on two machines of one network. Both have the same data, each at a path of its own, and the same versions of
# clipctl and torch. On each of them, with the address of the first:
#
#     examples/two-laptops.sh 192.168.1.10 photos/captions.csv
#
# The first one that arrives waits for the other. The run directory is on the machine of rank 0, which prints the progress.
address=${1:?the address of the first machine}
shift
exec torchrun --nnodes 2 --nproc-per-node 1 --rdzv-id clipctl --rdzv-backend c10d --rdzv-endpoint "$address:29500" \
    -m clipctl train "$@"
