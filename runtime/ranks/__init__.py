"""Ranks of a tensor-parallel run: processes of one machine, of which rank 0 leads.

launch.py     which rank this process is, by the environment of mpirun, srun, torchrun, or by rank 0
channel.py    messages between rank 0 and each other rank, and who may send them
identity.py   what must be equal on all ranks before any of them opens an engine
commands.py   what rank 0 asks of an engine, as bytes
processes.py  the other ranks' processes, as rank 0 has them
leader.py     rank 0: starts or awaits the others, gives commands, finds out who is lost
follower.py   every other rank: opens its files and executes commands
serve.py      turns a process that a launcher started into a follower
"""
