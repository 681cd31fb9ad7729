"""Pure decisions about a run: admission of work, number of workers, conditions, limits of a run.

The local host and the operator both use this package. It reads no clock, service or file.
"""

from vcpo.control.admission import admissible_trajectories, surplus_trajectories
from vcpo.control.conditions import Condition, ConditionStatus, ConditionType, Reason
from vcpo.control.decision import ControlDecision, decide
from vcpo.control.limits import ChangeKind, ControlLimits, GroupLimits, LimitChange
from vcpo.control.scaling import Direction
from vcpo.control.signals import RunSignals
from vcpo.control.state import ControlState

__all__ = [
    "ChangeKind",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "ControlDecision",
    "ControlLimits",
    "ControlState",
    "Direction",
    "GroupLimits",
    "LimitChange",
    "Reason",
    "RunSignals",
    "admissible_trajectories",
    "decide",
    "surplus_trajectories",
]
