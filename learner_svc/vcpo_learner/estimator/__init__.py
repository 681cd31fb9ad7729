"""From a batch's numbers to the coefficient of every token: the loss of every method.

| module          | holds                                                                         |
|-----------------|-------------------------------------------------------------------------------|
| `record`        | the batch: one tensor entry per trained token or per trajectory               |
| `loss`          | GRPO, DAPO, VCPO and all others, top to bottom                                |
| `own_functions` | how loss and baseline are found, called and checked, a user's own too         |
| `trial`         | the same on a small batch, before the first step                              |
| `token_weights` | importance weight and aggregation: the weight of one trajectory's tokens      |
| `clipping`      | clips and masks: the factor on each token's gradient                          |
| `bands`         | trust regions that are computed from the whole batch                          |

Every function is pure and sees the whole batch, so no result depends on how the batch is split into
micro-batches. `vcpo.algo.methods` says which configuration a method's name stands for.
"""
