r"""A stand-in for a trajectory's squared gradient norm, ||sum_t a_t g_t||^2.

Here g_t = grad log pi(y_t), and a_t is the token's weight in the gradient's estimator. A common
factor of all norms does not change a baseline that weighs by them, so a stand-in is as good as the
norm if both are proportional. `logitEnergy` keeps b_t, the gradient at the logits, and drops the
rest:

    sum_t a_t^2 e_t,    e_t = ||b_t||^2 = ||onehot(y) - pi||^2.

It assumes that tokens are uncorrelated, and that the way from the parameters to the logits
lengthens all of their b_t alike. It costs no backward pass.
"""

import torch
from torch import Tensor


def logit_energy_norms(weights: Tensor, energies: Tensor) -> Tensor:
    """sum_t a_t^2 e_t, [batch] float64.

    weights, energies: [batch, width]; weights are 0 outside the response.
    """
    return (weights.double().square() * energies).sum(dim=1)


def logit_energies(distributions: Tensor, sampled: Tensor) -> Tensor:
    """Squared length of the gradient of each token's log-probability at the logits, in [0, 2].

    e = ||onehot(y) - pi||^2 = 1 - 2 pi(y) + sum_v pi_v^2, at logits divided by the temperature.
    distributions: [..., vocabulary] nats, the log of pi.
    sampled: [...] nats, the log of pi(y).
    """
    collision = torch.logsumexp(2.0 * distributions, dim=-1).exp()
    # Rounding may leave the energy of a token that is all but certain just under zero.
    return (1.0 - 2.0 * sampled.exp() + collision).clamp_min(0.0)
