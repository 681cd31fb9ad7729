"""From a batch's numbers to the coefficient of every token: the loss of every method.

Every function is pure and sees the whole batch, so no result depends on how the batch is split into
micro-batches. `vcpo.algo.methods` says which configuration a method's name stands for.
"""
