"""Ranks of a tensor-parallel run: processes of one machine, of which rank 0 leads.

launch.py     the rank of this process, from the environment of mpirun, srun, torchrun or rank 0
channel.py    messages between rank 0 and each other rank, and which processes may send them
identity.py   what must be equal on all ranks before any of them opens an engine
commands.py   rank 0's calls of an engine, serialized as bytes
processes.py  the processes of the other ranks, as rank 0 sees them
leader.py     rank 0: starts or awaits the other ranks, sends commands, detects lost ranks
follower.py   every other rank: opens its files and executes commands
serve.py      turns a process that a launcher started into a follower
"""
