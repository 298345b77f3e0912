"""Schemas of the public click logs, as they are distributed."""

from __future__ import annotations

from stampede.data.schema.schema import Schema

CRITEO = Schema.model_validate(
    {
        "separator": "\t",
        "quote": "",
        "columns": [
            "label",
            *(f"I{i}" for i in range(1, 14)),
            *(f"C{i}" for i in range(1, 27)),
        ],
        "label": "label",
        "numbers": [f"I{i}" for i in range(1, 14)],
        "ids": [f"C{i}" for i in range(1, 27)],
    }
)

# The authors take the raw hour as an id, which no later day has again; `split_hour` says which.
_AVAZU_IDS = [
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
    "C14",
    "C15",
    "C16",
    "C17",
    "C18",
    "C19",
    "C20",
    "C21",
]


def avazu(split_hour: bool) -> Schema:
    """Avazu's log, CSV with a header.

    Args:
        split_hour: make hour of the day and weekday of `hour` (YYMMDDHH) instead of taking it as
            an id.
    """
    hours = {"hour_of_day": {"encode": "hour_of_day"}, "weekday": {"encode": "weekday"}}
    return Schema.model_validate(
        {
            "separator": ",",
            "label": "click",
            "ids": {**(hours if split_hour else {"hour": {}}), **dict.fromkeys(_AVAZU_IDS)},
            "time": {"column": "hour", "format": "%y%m%d%H"},
        }
    )
