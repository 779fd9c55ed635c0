"""Update the policy from the trees of a step, and publish it. The only part that imports torch, lightning and models.

settings.py   every knob, without torch
data.py       records of a step -> pruned trees -> credit -> packed rows
batch.py      trees -> rows in which each token stands once, shared prompt heads merged
attention.py  exact attention over such a row
losses.py     log-probs and objectives, pure
module.py     the optimizer updates of a step
callbacks.py  checkpoint, publish, log
trainer.py    `fit_rl`, `fit_sft`
policy.py     make, save and load policy folders
disk.py       what goes wrong while writing, as one kind of error
tokenizer.py  train a tokenizer with the tokens of the chat
"""
