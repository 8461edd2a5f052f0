"""The training objective around any model of this package."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class NextTokenLoss(nn.Module):
    """Mean cross-entropy in nats over a micro-batch; this is what gets traced as one chunk."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """A scalar, equal on all ranks of a tensor-parallel group.

        Logits that come as a vocabulary-sharded DTensor are never gathered: the caller holds
        `parallel.tensor.loss_context`, under which softmax reduces across ranks.
        """
        logits_SBV = self.model(tokens_BS)
        wide = torch.promote_types(logits_SBV.dtype, torch.float32)
        loss = F.cross_entropy(logits_SBV.flatten(0, 1).to(wide), targets_BS.t().flatten())
        return loss.to_local() if isinstance(loss, DTensor) else loss
