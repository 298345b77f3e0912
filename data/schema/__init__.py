"""What the columns of a click log mean."""

from stampede.data.schema.columns import IdField, NumberField
from stampede.data.schema.known_logs import CRITEO, avazu
from stampede.data.schema.schema import Schema, load_schema

__all__ = ["CRITEO", "IdField", "NumberField", "Schema", "avazu", "load_schema"]
