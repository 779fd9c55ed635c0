"""Update the policy from the trees of a step, and publish it. The only part that imports torch, lightning and models.

settings.py      every knob, without torch
steps.py         records of a step -> pruned trees -> credit -> packed rows
batch.py         trees -> rows in which each token stands once, shared prompt heads merged
attention.py     exact attention over such a row
networks.py      policy and critic over a row
losses.py        log-probs and objectives, pure; value_scale.py: the unit of returns
module.py        the optimizer updates of a step; rl_module.py: of RL; means.py: what is logged of them
ranks.py         several processes as one learner; sharding.py: their networks; follower.py: the others' program
data.py          steps in order, each when it is asked for
callbacks.py     checkpoint, publish, log
trainer.py       `fit_rl`, `fit_sft`
policy.py        make, save and load policy folders; models.py, exactness.py: which models are exact on trees
disk.py          what goes wrong while writing, as one kind of error
tokenizer.py     train a tokenizer with the tokens of the chat
cold_start.py    a policy that can be reinforced, from traces.py, until it passes exam.py
"""
