"""Calls become a prefix tree in which each draw stands once (laws 2 and 4). Pure; no torch.

build.py          calls -> CallTree
prune.py          the named rules that drop calls; what is left is what trains
conversation.py   how the draws continue one another, wherever the harness put them
drift.py          how faithfully the harness's histories repeated what was drawn
cut.py            a tree over the token budget in pieces; calls that fit into none
"""
