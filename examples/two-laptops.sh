#!/bin/bash
# Train on two machines of one network. Both have the same data, each at a path of its own, and the same versions of
# clipctl and torch. Pass the address of the first machine in the network, not its name: on many laptops the name means
# the machine itself (127.0.1.1), where the other cannot reach it. With the same settings on both:
#
#     examples/two-laptops.sh 0 192.168.1.10 photos/captions.csv --time 1h     # on the first
#     examples/two-laptops.sh 1 192.168.1.10 photos/captions.csv --time 1h     # on the second
#
# The first one that arrives waits for the other. The run directory is on the first, which prints the progress.
number=${1:?0 on the first machine, 1 on the second}
address=${2:?the address of the first machine}
shift 2
# Asked to stop, a process finishes its step and saves. torchrun kills it after so many seconds, otherwise after 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
exec torchrun --nnodes 2 --node-rank "$number" --nproc-per-node 1 --master-addr "$address" --master-port 29500 \
    -m clipctl train "$@"
