"""Calls become a prefix tree in which each draw stands once (laws 2 and 4). Pure; no torch.

build.py          calls -> CallTree
prune.py          the named rules that drop calls; what is left is what trains
conversation.py   how the draws continue one another, wherever the harness put them
drift.py          how faithfully the harness's histories repeated what was drawn
merge.py          several trees as one forest that shares its context
sequence.py       a plain sequence as a tree
cut.py            a tree over the token budget in pieces; calls that fit into none
"""
