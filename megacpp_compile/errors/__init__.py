"""Every error a user can meet, one class each; the message says what, where, and what to do.

All derive from `MegacppError`, and all are to be imported from here. The constructors take the facts, keep them as
attributes of the same name, and write the message, so that no caller spells a message of its own. All can be pickled
and copied. This package imports nothing of the others.
"""

from megacpp_compile.errors._base import MegacppError, Miss, closest, wrapped_in
from megacpp_compile.errors.attention import (
    AbsorbedInTrainingError,
    AttentionError,
    EvidenceError,
    ForwardOnlyError,
    OperandError,
)
from megacpp_compile.errors.decoding import (
    CacheError,
    CodecError,
    LatentCacheError,
    ServingConfigError,
    ServingRecordError,
)
from megacpp_compile.errors.frames import (
    CaptureError,
    CompileCacheError,
    DroppedOutputError,
    GraphBreakError,
    MixedDocumentsError,
    NotCapturedError,
    NotLoweredError,
    OtherPartsError,
    RanksDifferError,
    ReportFormatError,
    SequenceShardedError,
    UnfoundedSiteError,
    VerificationError,
)
from megacpp_compile.errors.machine import (
    DeviceNotMeasuredError,
    PackageMissingError,
    TargetMismatchError,
    TargetRecipeError,
    TargetUnavailableError,
    TorchInternalsError,
    TorchTooOldError,
)
from megacpp_compile.errors.memory import (
    BlockKindError,
    BuilderError,
    CheckpointedTwiceError,
    EstimateError,
    FitError,
    ForwardError,
    PeakUnreachableError,
    StagesOffError,
    TwoPoliciesError,
)
from megacpp_compile.errors.models import (
    AdapterError,
    AlreadyCompiledError,
    BlockNotFoundError,
    CompiledTooEarlyError,
    LayoutError,
    NotAModuleError,
    ResumeError,
    ShardingError,
)
from megacpp_compile.errors.precision import (
    DequantisationError,
    EngineError,
    ManifestError,
    PlanMismatchError,
    ScalingStateError,
    StockCheckpointError,
    WrapperError,
)
from megacpp_compile.errors.settings import (
    BadOptionError,
    RegistrationError,
    RequirementError,
    RuleWithoutHitError,
    UnknownOptionError,
    UnknownPassError,
)

__all__ = [
    "AbsorbedInTrainingError", "AdapterError", "AlreadyCompiledError", "AttentionError", "BadOptionError",
    "BlockKindError", "BlockNotFoundError", "BuilderError", "CacheError", "CaptureError", "CheckpointedTwiceError",
    "CodecError", "CompileCacheError", "CompiledTooEarlyError", "DequantisationError", "DeviceNotMeasuredError",
    "DroppedOutputError", "EngineError", "EstimateError", "EvidenceError", "FitError", "ForwardError",
    "ForwardOnlyError", "GraphBreakError", "LatentCacheError", "LayoutError", "ManifestError", "MegacppError", "Miss",
    "MixedDocumentsError", "NotAModuleError", "NotCapturedError", "NotLoweredError", "OperandError", "OtherPartsError",
    "PackageMissingError", "PeakUnreachableError", "PlanMismatchError", "RanksDifferError", "RegistrationError",
    "ReportFormatError", "RequirementError", "ResumeError", "RuleWithoutHitError", "ScalingStateError",
    "SequenceShardedError", "ServingConfigError", "ServingRecordError", "ShardingError", "StagesOffError",
    "StockCheckpointError", "TargetMismatchError", "TargetRecipeError", "TargetUnavailableError", "TorchInternalsError",
    "TorchTooOldError", "TwoPoliciesError", "UnfoundedSiteError", "UnknownOptionError", "UnknownPassError",
    "VerificationError", "WrapperError", "closest", "wrapped_in",
]  # fmt: skip
