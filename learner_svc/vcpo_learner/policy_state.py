"""A policy's state: the tensors that its configuration does not determine.

```
trained parameters     change in every step
persistent buffers     belong to the model's files, such as the trained bias of a router
```

Versions, checkpoints and exported models hold this state. Other buffers, such as rotary
frequencies, are computed from the configuration wherever the model is built. Beside adapters the
base model is frozen, its buffers too: whoever needs them reads them from the model's files.
"""

from torch import Tensor, nn

from vcpo.service.persistent_buffers import own_buffers


def policy_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state by name, as the model holds it; a shared tensor under its first name."""
    return trainable_parameters(model) | trained_buffers(model)


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name; a shared one under its first name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def trained_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers by name; none if a base model is frozen beside adapters."""
    is_frozen = not all(each.requires_grad for each in model.parameters())
    return {} if is_frozen else persistent_buffers(model)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to a model's files, by name; few families have any."""
    # Not by `state_dict`: of a model that is cut over ranks it moves parameters.
    return {
        f"{path}.{name}".removeprefix("."): buffer
        for path, module in model.named_modules()
        for name, buffer in own_buffers(module).items()
    }
