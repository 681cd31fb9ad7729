"""A user's own code in a run: what a field of its file names as `package.module:Name`.

Environments, engines and tracking services come in by this door, the shipped ones too. An import
runs the module, so a run can execute any Python that is installed where it runs, or that lies
beside its file. This is intended.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from vcpo.api import VCPORun
from vcpo.api.run import RUN_FOLDER_ANNOTATION


def import_from_run_folder(run: VCPORun) -> None:
    """Put the folder of the run's file last on the import path, where it hides no library.

    A user's module can lie beside the run's file, as a relative model directory can. In a cluster
    there is no such folder, and the module must be installed in the image.
    """
    folder = run.metadata.annotations.get(RUN_FOLDER_ANNOTATION)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def beside_or_in(image: str) -> str:
    """Return the fix for a user's module that is not found; `image` is that of a cluster."""
    return (
        f"put its module beside the run's file, or install it (in a cluster, in the {image}"
        " image), and check the spelling"
    )


def import_named(path: str, *, field: str, fix: str, name: str | None = None) -> Any:
    """Import what `package.module:Name` names.

    field: the field of the run, for errors.
    fix: what to do if it cannot be imported.
    name: what the user wrote, if it is not the path.
    """
    module_name, _, own_name = path.partition(":")
    try:
        return getattr(import_module(module_name), own_name)
    except (Exception, SystemExit) as error:  # an import runs user code, which may raise anything
        raise ValueError(
            f"{field}: {name or path!r} cannot be imported ({type(error).__name__}: {error}); {fix}"
        ) from error


def require_class(
    found: object, *, field: str, name: str, what: str, methods: Sequence[str]
) -> type:
    """Return a class that has the methods.

    Checked before any call: a name must not be a way to call any object with arguments.

    what: what the class must be, with its article.
    """
    missing = [each for each in methods if not callable(getattr(found, each, None))]
    if isinstance(found, type) and not missing:
        return found
    lacks = f"it has no {' and no '.join(missing)}" if isinstance(found, type) else "not a class"
    listed = f"{', '.join(methods[:-1])} and {methods[-1]}"
    raise ValueError(
        f"{field}: {name!r} is not {what} ({lacks}); it must be a class with the methods {listed}"
    )


def require_arguments(
    function: Any, arguments: Mapping[str, object], *, beside: Sequence[str], field: str, name: str
) -> None:
    """Check that a function takes arguments that a run's file gives.

    beside: names of the arguments that it gets besides.
    field: the field of the run that holds the arguments.
    name: what the file calls the function's class.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments, **dict.fromkeys(beside))
    except TypeError as error:
        known = ", ".join(sorted(set(signature.parameters) - set(beside))) or "none"
        raise ValueError(
            f"{field}: {dict(arguments)!r} does not suit {name!r} ({error}); the known parameters"
            f" are {known}"
        ) from error
