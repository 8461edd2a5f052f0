"""Processes that are the ranks of a job: started, kept together, watched, ended, and compared.

launch.py             starts the ranks of a run on this machine, and ends them
supervise.py          the launcher's eye on its ranks, from birth to end
launched.py           what a process knows from its environment: rank, job, launcher
attempt.py            how the ranks of one attempt find each other
device.py             this rank's device, settled before the process group
process_group.py      the process group of a rank, joined and watched
determinism.py        what makes the bits of a step differ from run to run
identity.py           which process a rank is, how it is, and its safe end
watchdog.py           ends every rank within seconds when one dies, stalls or fails
heartbeat.py          what ranks write to and read from the store to watch each other
silence.py            when a process that says nothing counts as dead
store_host.py         the process that hosts the store, as a rank sees it
ending.py             how a process ends when its main thread cannot end it
signals.py            SIGINT and SIGTERM end a run on all ranks at the same step
small_collectives.py  the largest, the mean, the first rank's or all ranks' small values
agree.py              ranks prove that they hold the same, and name those that do not
replicas.py           digests of tensors, for ranks that hold the same part to compare
source_files.py       code as what ranks compare
"""
