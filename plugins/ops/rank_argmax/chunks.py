"""How many ids one key stands for. Apart from the kernels, so that computing what ranks exchange
imports nothing else."""

PEER_CHUNK = 1024  # ids that a warp chooses from, where each rank has a device
