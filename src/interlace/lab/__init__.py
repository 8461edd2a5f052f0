"""Slow links and hosts without a cluster.

namespaces.py       hosts made of network namespaces, each behind a shaped link
hosts.py            a command on every rank of such a lab
pin.py              one rank of a lab on one core
links.py            a slow link emulated in user space, around gloo
link_work.py        one emulated link, and the works that complete by it
imagined_world.py   one process as a rank of an imagined cluster
imagined_values.py  what collectives give to a rank whose peers are all like it
imagined_cuda.py    a stream on which a collective's time passes
"""
