"""Plain data that the parts of Headway exchange, one module for each subject.

Points in time (`…_at`) are seconds on the broker's own clock, and have no meaning outside it. So gateways send brokers
only durations in seconds (`queue_timeout`, `timeout`), never points in time."""

from __future__ import annotations

from headway.model.batch import BatchFailure, BatchRun, Cause, Completion, ItemResult, Lease, NoWork, Slot
from headway.model.entry import DeadLetter, DedupKey, DedupKind, Entry, EntryState, QueueName, Submission
from headway.model.fleet import (
    MODEL_XIDS,
    BulkDepth,
    Capacity,
    Departed,
    Drain,
    EndKind,
    GpuFigures,
    ModelReport,
    ProcessInfo,
    Role,
    Scaling,
    TierDepth,
    WorkerInfo,
    WorkerStatus,
)
from headway.model.identity import ApiKey, Limit, ModelLimit, Principal
from headway.model.request import (
    CarriedTrace,
    Failure,
    InferenceRequest,
    LedgerRecord,
    Reply,
    RequestOptions,
    RequestStatus,
    TraceContext,
)
from headway.model.rollout import Rollout, RolloutState, VersionCounts
from headway.model.value import (
    ALL_PARAMETERS,
    KIND,
    KIND_OF_LETTER,
    KINDS,
    MOST_OUTPUT,
    MOST_TOKENS,
    WARM_UP,
    CostLine,
    CostShape,
    KindFacts,
    Octets,
    Output,
    PerCall,
    RowsTogether,
    Signature,
    Tensors,
    TensorSpec,
    TokenCount,
    Value,
    ValueKind,
    WeightLine,
    added_up,
    kind_of,
)
