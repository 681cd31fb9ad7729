"""Seeds of responses and of their tokens: what a token is does not depend on its neighbours.

```
lease's seed --number in the group--> response's seed --tokens before it--> token's seed
```

A worker that begins a response again, or another that resumes it, so draws the same numbers. With
the same weights it samples the same tokens, but for the last bits in which sums differ between
batches of other sizes.
"""

import xxhash

from vcpo.wire.v1 import work_pb2


def response_seed(lease: work_pb2.Lease, number: int) -> int | None:
    """Return the seed of a response, 63 bits; None if the lease has no seed.

    number: of the response in its group.
    """
    if not lease.sampling.HasField("seed"):
        return None
    return _hash(lease.sampling.seed, number)


def token_seed(response_seed: int, num_tokens: int) -> int:
    """Return the seed of the numbers that draw one token, 63 bits.

    num_tokens: prompt and response tokens before it.
    """
    return _hash(response_seed, num_tokens)


def _hash(seed: int, number: int) -> int:
    # 63 bits, because torch and vLLM take a signed seed.
    return xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"), seed=seed) >> 1
