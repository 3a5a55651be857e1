"""The gguf package's writer, for values of any kind. Imports the package: import this late."""

from __future__ import annotations

import struct
from typing import Any

from gguf import GGUFValueType, GGUFWriter


class Writer(GGUFWriter):
    """Writes lists without elements, too.

    llama.cpp does not open a byte-level vocabulary without a list of merges, and that of single
    bytes has none; the package leaves such a list out.
    """

    def add(self, key: str, value: Any) -> None:
        """A setting: true or false, a whole number from 0 to 2**32, a number, text or a list."""
        if isinstance(value, bool):
            self.add_bool(key, value)
        elif isinstance(value, int):
            self.add_uint32(key, value)
        elif isinstance(value, float):
            self.add_float32(key, value)
        elif isinstance(value, str):
            self.add_key_value(key, value, GGUFValueType.STRING)
        else:
            self.add_key_value(key, value, GGUFValueType.ARRAY)

    def _pack_val(
        self,
        val: Any,
        vtype: GGUFValueType,
        add_vtype: bool,
        sub_type: GGUFValueType | None = None,
    ) -> bytes:
        if vtype == GGUFValueType.ARRAY and not len(val):
            return struct.pack("<IIQ", vtype, GGUFValueType.STRING, 0)
        return super()._pack_val(val, vtype, add_vtype, sub_type)
