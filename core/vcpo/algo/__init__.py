"""The mathematics of variance-controlled off-policy training, on plain numbers.

VCPO decides about an optimizer step from four numbers per trajectory: its log importance weight,
its length, its reward and the norm of its gradient. The functions of this package compute these
decisions. They use no tensors, clocks, files, sockets or logs.

Arguments may be Python numbers, numpy arrays or torch tensors, of any dtype and on any device.

| module                   | question that it answers                                          |
|--------------------------|-------------------------------------------------------------------|
| `arrays`                 | What numbers does an array hold?                                  |
| `ess.importance_weights` | How far is the learner from the behavior policy?                  |
| `ess.moments`            | Which sums give the ESS of a set of weights?                      |
| `ess.unit`               | Over how many tokens is one importance weight taken?              |
| `ess.calibration`        | Which ESS ratio would these lengths have on policy?               |
| `ess.finite_batch`       | How does that ratio scatter in a batch of this size?              |
| `ess.verdict`            | Is the step taken, and at which share of the learning rate?       |
| `ess.learning_rate`      | How does the learning rate follow the ESS ratio?                  |
| `ess.trust_region`       | Which rate keeps data usable until it is used?                    |
| `coverage`               | How much of the policy does stale data show?                      |
| `baseline`               | Which baseline minimizes the variance of the gradient?            |
| `agreement`              | Do two computations of one number differ by rounding alone?       |
| `advantage`              | With which sign and size does each trajectory count?              |
| `vtrace`                 | What is each token worth, given a critic and off-policy samples?  |
| `methods`                | Which settings make up a published method?                        |
| `rollout_noise`          | How much noise do the weights of a rollout policy carry?          |
| `health.collapse`        | Did a run lose what it had learned?                               |
| `health.diagnostics`     | What does a batch look like?                                      |
| `health.lag_breakdown`   | At which lags does a batch lose its ESS?                          |
| `health.fresh_tokens`    | How far are worker and learner apart at the same version?         |
| `health.mismatch_review` | Do workers and learner compute the same policy?                   |
| `health.early_warning`   | How is the run doing?                                             |
| `health.rate_backoff`    | At which share of its learning rate does a critical run go on?    |
| `health.guards`          | What does a run do by itself about its warning or its collapse?   |

Source of the method: VCPO, "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", arXiv
2602.17616. Each module names its equations and how it differs from the released code.
"""
