"""Pure decisions about a run: admission of work, number of workers, health.

Used by the local host and the operator alike. Nothing here knows a clock, a service or a file.
"""

from vcpo.control.admission import admissible_trajectories, surplus_trajectories
from vcpo.control.conditions import Condition, ConditionStatus, ConditionType, Reason
from vcpo.control.decision import ControlDecision, decide
from vcpo.control.limits import GroupLimits, Limits
from vcpo.control.scaling import Direction
from vcpo.control.signals import RunSignals
from vcpo.control.state import ControlState

__all__ = [
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "ControlDecision",
    "ControlState",
    "Direction",
    "GroupLimits",
    "Limits",
    "Reason",
    "RunSignals",
    "admissible_trajectories",
    "decide",
    "surplus_trajectories",
]
