"""Rewards become advantages. numpy only: a stored rollout can be credited again on a laptop.

settings.py  which estimator, and its knobs
group.py     the GRPO family: one advantage per rollout and role, relative to its group
gae.py       from values: an advantage and a return per token, along the conversations of one rollout
values.py    the same for a whole step: whitening, and what is logged
"""
