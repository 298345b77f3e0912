"""A Parquet file with a damaged page."""

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from stampede.data import DataError
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema

USERS = np.arange(10**9, 10**9 + 500)


def test_pages_with_checksums_are_verified(tmp_path):
    schema = Schema.model_validate({"label": "y", "ids": ["user"]})
    table = pyarrow.Table.from_pandas(pd.DataFrame({"y": np.arange(500) % 2, "user": USERS}))
    found = {}
    for checked in (True, False):
        path = tmp_path / f"log_{checked}.parquet"
        pyarrow.parquet.write_table(
            table, path, compression="none", use_dictionary=False, write_page_checksum=checked
        )
        content = bytearray(path.read_bytes())
        place = content.index(int(USERS[99]).to_bytes(8, "little"))
        content[place] ^= 1
        path.write_bytes(content)
        log = RawLog(schema, [path])
        if checked:
            with pytest.raises(DataError, match=r"log_True.parquet: cannot be read as Parquet"):
                list(log.chunks(BadRows("error")))
        else:
            # As the manual says, nobody can notice it.
            found = next(log.chunks(BadRows("error"))).frame["user"].to_list()
            assert [int(user) for user in found] != USERS.tolist()
