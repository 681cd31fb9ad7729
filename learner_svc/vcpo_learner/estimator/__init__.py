r"""From a batch's numbers to the coefficient of every token: the stages of a method's config.

| module         | stage                                                                   |
|----------------|-------------------------------------------------------------------------|
| `record`       | the batch as padded float64 tensors; what a config wants to know of it  |
| `shaping`      | rewards before, and residuals after, the baseline; whitening            |
| `weights`      | importance weight and aggregation: what one trajectory's tokens weigh   |
| `bands`        | trust regions that are found from the whole batch                       |
| `gates`        | what a clip or a mask lets through                                      |
| `coefficients` | all of them together                                                    |

Everything here is a pure function of the whole batch, so that no decision can depend on its split
into micro-batches. `vcpo.algo.methods` says which config a method's name stands for.
"""
