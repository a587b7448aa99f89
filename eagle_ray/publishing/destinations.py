"""Parse the name of a publishing destination.

destination_of("hf://datasets/org/name")           # a dataset of the Hugging Face hub
destination_of("delta:runs/answers")               # a Delta table, local or s3://
destination_of("iceberg:prod/lab.answers")         # a table of a catalog of PyIceberg's configuration
"""

from __future__ import annotations

from eagle_ray.config.destination import DELTA, HUB, ICEBERG, check_destination
from eagle_ray.core.errors import ConfigError
from eagle_ray.publishing.delta_table import DeltaTable
from eagle_ray.publishing.hub_dataset import HubDataset
from eagle_ray.publishing.iceberg_table import IcebergTable
from eagle_ray.publishing.publication import Destination


def destination_of(text: str, private: bool = True) -> Destination:
    """Return the destination with this name. Raises ConfigError.

    Args:
        private: whether a newly created dataset of the hub is private.
    """
    try:
        check_destination(text)
    except ValueError as error:
        raise ConfigError(f"--to: {error}") from error
    if text.startswith(HUB):
        owner, name, *folder = text.removeprefix(HUB).split("/")
        return HubDataset(text, f"{owner}/{name}", "/".join(folder), private)
    if text.startswith(ICEBERG):
        return IcebergTable(text)
    return DeltaTable(text, text.removeprefix(DELTA))
