"""Failures of the API server, in the vocabulary of `metav1.Status`.

Source: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/status/
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One field's part in an Invalid answer.

    field: path as Kubernetes writes it, `spec.rollouts[0].name`.
    message: begins with the class of the mistake, `Required value`, `Invalid value: 3: ...`.
    reason: a `CauseType`, such as FieldValueRequired.
    """

    field: str
    message: str
    reason: str = "FieldValueInvalid"


class ApiError(Exception):
    """An answer other than success.

    code: HTTP status. reason: one word for programs. retry_after_s: None means no such header.
    """

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: JsonObject | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}
        self.retry_after_s = retry_after_s

    def status(self) -> JsonObject:
        """The `Status` object that the client reads."""
        details = dict(self.details)
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": details,
            "code": self.code,
        }


def bad_request(message: str) -> ApiError:
    """The request cannot be understood."""
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    """The token is nobody's."""
    return ApiError(401, "Unauthorized", "Unauthorized")


def forbidden(resource: str, name: str, why: str) -> ApiError:
    """The request is understood and refused. resource: `plural.group`."""
    subject = f'{resource} "{name}"' if name else resource
    return ApiError(
        403, "Forbidden", f"{subject} is forbidden: {why}", details={"name": name, "kind": resource}
    )


def not_found(resource: str, name: str) -> ApiError:
    """No object of that name. resource: `plural.group`."""
    plural, _, group = resource.partition(".")
    details = {"name": name, "group": group, "kind": plural}
    return ApiError(404, "NotFound", f'{resource} "{name}" not found', details=details)


def no_such_path() -> ApiError:
    """Nothing is served at this address."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(resource: str, name: str) -> ApiError:
    """The name is taken."""
    plural, _, group = resource.partition(".")
    details = {"name": name, "group": group, "kind": plural}
    return ApiError(409, "AlreadyExists", f'{resource} "{name}" already exists', details=details)


def conflict(resource: str, name: str, why: str) -> ApiError:
    """Somebody else changed the object first, or a precondition does not hold."""
    message = f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    return ApiError(409, "Conflict", message, details={"name": name, "kind": resource})


def expired(message: str) -> ApiError:
    """The version asked for is no longer in the history."""
    return ApiError(410, "Expired", message)


def unsupported_media_type(received: str, supported: Sequence[str]) -> ApiError:
    """The body is in a format that this server does not read."""
    message = (
        "the body of the request was in an unknown format "
        f"({received}) - accepted media types include: {', '.join(supported)}"
    )
    return ApiError(415, "UnsupportedMediaType", message)


def invalid(kind: str, group: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """The object breaks a rule of its kind; causes name every field."""
    qualified = f"{kind}.{group}" if group else kind
    text = ", ".join(f"{cause.field}: {cause.message}" for cause in causes)
    listed = text if len(causes) == 1 else f"[{text}]"
    details = {
        "name": name,
        "group": group,
        "kind": kind,
        "causes": [
            {"reason": cause.reason, "message": cause.message, "field": cause.field}
            for cause in causes
        ],
    }
    return ApiError(422, "Invalid", f'{qualified} "{name}" is invalid: {listed}', details=details)
