"""What a run leaves behind: the run folder, its events, its summary.

Answers: what happened? Must not know: how training works.
"""

from shardwise.runs.course import Course, read_course
from shardwise.runs.create import create_run
from shardwise.runs.folder import CheckpointFolder, RunFolder, is_run, list_runs, open_run
from shardwise.runs.records import (
    EVENTS,
    Checkpoint,
    End,
    Estimated,
    Evaluation,
    Event,
    Fault,
    Measured,
    Resume,
    Sample,
    SamplePair,
    Start,
    State,
    Status,
    Step,
    Summary,
    Term,
    Warned,
)

__all__ = [
    "EVENTS",
    "Checkpoint",
    "CheckpointFolder",
    "Course",
    "End",
    "Estimated",
    "Evaluation",
    "Event",
    "Fault",
    "Measured",
    "Resume",
    "RunFolder",
    "Sample",
    "SamplePair",
    "Start",
    "State",
    "Status",
    "Step",
    "Summary",
    "Term",
    "Warned",
    "create_run",
    "is_run",
    "list_runs",
    "open_run",
    "read_course",
]
