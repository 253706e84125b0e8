"""The oldest releases for which the peer offers each kind of parallelism, for programs that compare with them.

Nothing here asks for them: what is installed decides, step by step.
"""

BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
"""torch, for tensor parallelism."""

BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
"""transformers, for a model's own tensor-parallel plan."""

BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
"""torch, for context parallelism."""

BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
"""DeepSpeed, for its sequence parallelism."""
