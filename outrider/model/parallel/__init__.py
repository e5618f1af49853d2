"""One model on several ranks: how it is split, loaded, run and kept in step.

plan       which slice of each parameter a rank has, from the model's own `tp_plan`
shards     reads those slices and nothing else
linears    layers over slices: sums over ranks, embedding and head by vocabulary
group      the ranks' connection: sums, gathers, one small message a step, time limits
wires      plain connections, for messages
messages   that message
choosing   the token of a row whose logits are spread over ranks
leader     rank 0: a `PagedModel` to the rest of a verify worker
follower   the other ranks: the same steps, no decisions
"""
