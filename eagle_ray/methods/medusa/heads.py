"""Path heads: one small head for each level of a tree, all reading the target's last feature; no attention.

    logits = heads.logits(level, feature, path, target.logits)       # after each path of `level` drafted tokens

    MedusaHeads    read the feature alone: all nodes of a level have the same children (arXiv 2401.10774, section 2.1)
    HydraHeads     read the tokens of the path as well (arXiv 2402.05109, section 3)

The feature is of the token before the root. Module names are the published key names.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

from eagle_ray.models.supported_models import LogitsOf


class MedusaHeads(nn.ModuleList):
    """Heads that read one feature of the target.

    Args:
        num_layers: residual blocks per head.
        own_lm_head: each head has its own lm_head; otherwise the target's is used.

    Attributes:
        num_levels: the longest path that can be drafted.
        shape: sizes that the cost of a pass depends on, as JSON.
    """

    method = "medusa"

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        *,
        own_lm_head: bool,
    ):
        lm_head = [vocab_size] if own_lm_head else []
        super().__init__(
            nn.Sequential(
                *(ResidualBlock(hidden_size) for _ in range(num_layers)),
                *(nn.Linear(hidden_size, size, bias=False) for size in lm_head),
            )
            for _ in range(num_heads)
        )
        self.num_levels = num_heads
        self._own_lm_head = own_lm_head
        self.shape = {"medusa": [num_heads, num_layers, hidden_size, vocab_size]}

    def feature_layers(self, num_layers: int) -> None:
        return None

    def logits(
        self,
        level: int,
        feature: Float[Tensor, "B H"],
        path: Float[Tensor, "B F L H"],
        target_logits: LogitsOf,
    ) -> Float[Tensor, "B F V"]:
        """Return the logits after F paths of `level` drafted tokens; L = level + 1.

        Args:
            feature: what the target's lm_head read when the root was sampled.
            path: embeddings of the root and the drafts.
        """
        hidden = self[level](feature)
        logits = hidden if self._own_lm_head else target_logits(hidden)
        return logits[:, None].expand(-1, path.shape[1], -1)


class HydraHeads(nn.Module):
    """Heads that read the feature and the drafted path.

    Args:
        num_layers: residual blocks per head; the first maps feature and path to hidden_size.
    """

    method = "hydra"

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int):
        super().__init__()
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                ResidualBlock(hidden_size, num_inputs=level + 2),
                *(ResidualBlock(hidden_size) for _ in range(num_layers - 1)),
            )
            for level in range(num_heads)
        )
        self.hydra_lm_head = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size) for _ in range(num_heads)
        )
        self.num_levels = num_heads
        self.shape = {"hydra": [num_heads, num_layers, hidden_size, vocab_size]}

    def feature_layers(self, num_layers: int) -> None:
        return None

    def logits(
        self,
        level: int,
        feature: Float[Tensor, "B H"],
        path: Float[Tensor, "B F L H"],
        target_logits: LogitsOf,
    ) -> Float[Tensor, "B F V"]:
        features = feature[:, None].expand(-1, path.shape[1], -1)
        hidden = self.hydra_mlp[level](torch.cat([features, path.flatten(2)], -1))
        return self.hydra_lm_head[level](hidden)


class ResidualBlock(nn.Module):
    """x + silu(linear(x)). With num_inputs concatenated vectors, a linear map to one vector replaces x."""

    def __init__(self, size: int, num_inputs: int = 1):
        super().__init__()
        self.linear = nn.Linear(num_inputs * size, size)
        self.res_connection = (
            nn.Linear(num_inputs * size, size) if num_inputs > 1 else nn.Identity()
        )

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows H"]:
        return self.res_connection(x) + silu(self.linear(x))
