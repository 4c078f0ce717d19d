"""Runs inside each vLLM worker (`--worker-extension-cls`): loads a checkpoint in place so that its weights really answer.

vLLM adds this class to its worker's bases and lets `/collective_rpc` call its methods.
"""

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from torch import nn


class CheckpointWorker:
    model_runner: Any  # vLLM's worker has it

    if TYPE_CHECKING:

        def reload_weights(self, *, weights_path: str) -> None:
            """vLLM's own: reads a folder or hub id over the present weights."""

    def load_checkpoint(self, weights_path: str) -> None:
        """Raises what the loading raised; the weights are then in an unknown state."""
        if current_platform.is_cpu():
            forget_packed_experts(self.model_runner.get_model())
        self.reload_weights(weights_path=weights_path)


def forget_packed_experts(model: "nn.Module") -> None:
    """Makes vLLM pack the experts' weights again when they are loaded the next time.

    On the CPU a mixture's experts are packed for the kernel after loading, but vLLM 0.32 does it only where no kernel
    exists yet; a reload then copies unpacked weights into packed storage, and the model answers fluently from scrambled
    experts. Without a kernel the first-time path is taken. On a GPU nothing is packed there, and captured graphs need the
    kernel to stay. Goes when vLLM packs on reload too; tests/real compares a reload of the same weights.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None
