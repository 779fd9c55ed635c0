"""Rewards become advantages. numpy only: a stored rollout can be credited again on a laptop.

group.py    the GRPO family: one advantage per rollout, relative to its group
"""
