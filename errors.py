"""Every way llmctl can fail, one class per cause.

A message names what was found, what was wanted and where (file, tensor, flag); `fix` is the next
step, a command when there is one. Exit codes (docs/cli.md):

    0 done   1 named failure   2 usage   3 resources   4 rebuild needed   70 bug   130/143 signals
"""

from __future__ import annotations


class LlmctlError(Exception):
    """A failure with a named cause and a next step. One subclass per cause."""

    exit_code = 1
    usual_fix = ""  # for a class whose failures have the same fix, unless one says otherwise

    def __init__(self, what: str, *, fix: str = "", general_fix: str = "") -> None:
        """general_fix: for a command that takes no options of one draft method, where `fix` names
        some."""
        super().__init__(what)
        self.fix = fix or self.usual_fix
        self.general_fix = general_fix or self.fix

    @property
    def name(self) -> str:
        """The stable name scripts match on (`--json` prints it)."""
        return type(self).__name__


# ---- usage: the command line or a config object asks for something impossible (exit 2) ----


class BadConfig(LlmctlError):
    """An option or config field has a value outside its range, or two options contradict."""

    exit_code = 2


class Unsupported(LlmctlError):
    """The request is well-formed, but this version cannot do it; says what it can do."""

    exit_code = 2


class BadKey(LlmctlError):
    """A file of a signing key cannot be read, or holds another key than is wanted."""

    exit_code = 2


# ---- checkpoints (exit 1) ----


class BadCheckpoint(LlmctlError):
    """The checkpoint folder cannot be used. Subclasses name the defect."""


class CheckpointNotFound(BadCheckpoint):
    """No folder, no config.json, or no weights at the given path."""

    usual_fix = "give a folder in Hugging Face format (config.json and *.safetensors)"


class CorruptFile(BadCheckpoint):
    """A file is truncated, is not valid safetensors/JSON, or contradicts its own header."""

    usual_fix = "fetch this file of the checkpoint again, or correct it"


class UnsafePath(BadCheckpoint):
    """An index names a file outside its own folder."""


class PickleCheckpoint(BadCheckpoint):
    """Only pickle weights (.bin/.pt) are present, or a .pt of heads holds more than tensors."""


class MissingTensor(BadCheckpoint):
    """A tensor that the config promises is absent."""


class UnexpectedTensor(BadCheckpoint):
    """A tensor is present that the config does not imply; ignoring it would change the model."""


class BadTensorShape(BadCheckpoint):
    """A tensor's shape or dtype is not what the config implies."""


class BadTensorValue(BadCheckpoint):
    """A scale is zero, negative, NaN or infinite, or a weight holds NaN or infinity."""


class UnknownArchitecture(BadCheckpoint):
    """`architectures`/`model_type` in config.json names a family llmctl does not know."""


class UnknownQuantization(BadCheckpoint):
    """The quantization method or scheme of the checkpoint is not one llmctl reads."""

    usual_fix = "start from the unquantized checkpoint and run `llmctl quantize`"


class BadCalibrationData(LlmctlError):
    """The calibration text is missing, unreadable, or too small for the asked-for sample count."""

    usual_fix = "name a file of text: --calib-dataset FILE.txt"


class TokenizerError(LlmctlError):
    """Tokenizer files are missing or unreadable, or have no chat template when one is needed."""


# ---- engines ----


class EngineNotFound(LlmctlError):
    """No engine directory (config.json + rank{N}.engine) at the given path."""


class CorruptEngine(LlmctlError):
    """An engine file is truncated or contradicts its config.json."""


class UntrustedEngine(LlmctlError):
    """An engine is not signed by the trusted builder, or is not what that builder signed."""


class RebuildNeeded(LlmctlError):
    """The engine was built by another schema version or for another machine (exit 4)."""

    exit_code = 4


class PairMismatch(LlmctlError):
    """Target and draft engines cannot work together (vocabulary, tokenizer, roles, lengths)."""


class KernelCompileError(LlmctlError):
    """A kernel's source does not compile, or its binary is not what its description says."""

    usual_fix = "see which compilers `llmctl doctor` finds; report the kernel's name with them"


class DeviceFailure(LlmctlError):
    """The CUDA driver refused a call or reported that a kernel failed."""


class RankFailure(LlmctlError):
    """A rank of a tensor-parallel run ended, hung, or is none of that run; says which and why."""


# ---- requests ----


class RequestError(LlmctlError):
    """A request cannot be served by this engine."""


class PromptTooLong(RequestError):
    """The prompt does not fit max_seq_len."""


class BadLogits(RequestError):
    """An engine computed NaN where a token should have been chosen."""


class ExecutorClosed(RequestError):
    """The executor has been shut down."""


class QueueFull(RequestError):
    """The executor's request queue is at its limit."""


class ExactnessViolation(LlmctlError):
    """Speculative output differed from plain decoding where it must be identical."""


# ---- publishing and resources ----


class OutputExists(LlmctlError):
    """The output path exists already, or another process published it first."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"{path} already exists",
            fix="choose another output directory, or remove that one first",
        )


class ResourceError(LlmctlError):
    """The machine has too little of something (exit 3)."""

    exit_code = 3


class OutOfDisk(ResourceError):
    """The output does not fit the file system."""


class OutOfMemory(ResourceError):
    """Weights, KV cache and activations do not fit the memory that is there."""


class MissingPackage(ResourceError):
    """A Python package is not installed; the fix is the command that installs it."""


class NoDevice(ResourceError):
    """The backend needs a device, or a library of the system, that is absent."""
