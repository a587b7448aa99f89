"""Jobs whose engine is a toy, and a catalog of Iceberg tables."""

import pytest

from tests.support.starts import engine

__all__ = ["engine"]


@pytest.fixture(scope="session")
def iceberg_catalog(tmp_path_factory):
    """A catalog in SQLite: PyIceberg reads its configuration once in a process."""
    pytest.importorskip("pyiceberg", reason="pip install 'eagle-ray[iceberg]'")
    place = tmp_path_factory.mktemp("iceberg")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYICEBERG_CATALOG__LAB__URI", f"sqlite:///{place}/catalog.db")
        environment.setenv("PYICEBERG_CATALOG__LAB__WAREHOUSE", f"file://{place}/warehouse")
        yield
