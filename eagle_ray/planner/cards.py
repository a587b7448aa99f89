"""Data sheet figures of GPUs by name, from which `eagle-ray plan` estimates the seconds of a pass.

    >>> find_card("L40S").memory_gb
    48
    >>> find_card("l4").is_device("NVIDIA L40S"), find_card("l4").is_device("NVIDIA L4")
    (False, True)

Memory, memory bandwidth and dense bf16 products are those of NVIDIA's data sheets, as of 2026-11:
nvidia.com/en-us/data-center/ a100, h100, h200, l4, l40s and products/a10-gpu, the DGX B200's data
sheet, and the Ada GPU architecture's for the RTX 4090. A link is NVLink or PCIe, in one direction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle_ray.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU.

    Attributes:
        name: name for `eagle-ray plan --gpus`.
        device: pattern of torch's name of the device.
        memory_gb: memory in GB of 10^9 bytes.
        bandwidth_gb_s: memory bandwidth in GB per second.
        tflops: dense bf16 operations per second, in 10^12.
        link_gb_s: GB per second to another GPU of the machine, in one direction.
    """

    name: str
    device: str
    memory_gb: float
    bandwidth_gb_s: float
    tflops: float
    link_gb_s: float

    def is_device(self, name: str) -> bool:
        """Return whether a device with this torch name is such a card."""
        return re.search(self.device, name) is not None


CARDS = {
    card.name: card
    for card in (
        Card("a10", r"\bA10\b", 24, 600, 125, 32),
        Card("a100", r"\bA100\b.*80GB", 80, 2039, 312, 300),
        Card("a100-40", r"\bA100\b.*40GB", 40, 1555, 312, 300),
        Card("b200", r"\bB200\b", 180, 8000, 2250, 900),
        Card("h100", r"\bH100\b(?! PCIe| NVL)", 80, 3350, 989, 450),
        Card("h100-pcie", r"\bH100 PCIe\b", 80, 2000, 756, 64),
        Card("h200", r"\bH200\b", 141, 4800, 989, 450),
        Card("l4", r"\bL4\b", 24, 300, 121, 32),
        Card("l40s", r"\bL40S\b", 48, 864, 362, 32),
        Card("rtx4090", r"\bRTX 4090\b", 24, 1008, 165, 32),
    )
}


def find_card(name: str, flag: str = "--gpus") -> Card:
    """Return the card with a name, in any case. Raises ConfigError with the known names.

    Args:
        flag: command line flag of the name, for the error.
    """
    card = CARDS.get(name.lower())
    if card is None:
        raise ConfigError(f"{flag}: {name!r} is no known card. Known: {', '.join(CARDS)}")
    return card
