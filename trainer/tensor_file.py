"""Named tensors in one file, in the safetensors format (https://huggingface.co/docs/safetensors).

Eight bytes with the header's length, a JSON header with dtype, shape and place of each tensor, raw little-endian
bytes. Written here rather than by a library, because the digest is taken while the bytes go out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_LONGEST_HEADER = 100 * 2**20  # the format's own limit


class TensorFileError(ValueError):
    """A file that is not what it should be; one sentence that names it."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write CPU tensors, flush to the disk, return the file's sha256 (hex).

    Raises:
        TensorFileError: a dtype that the format has no name for.
        OSError: the file cannot be written.
    """
    text = _header(tensors, metadata, str(path))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        pieces = [len(text).to_bytes(_LENGTH_BYTES, "little"), text]
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        for tensor in tensors.values():
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(raw)
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def encode_tensors(tensors: Mapping[str, Tensor]) -> Tensor:
    """What `write_tensors` would write, as uint8 [c]."""
    text = _header(tensors, None, "tensors")
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    rows = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *rows])


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None, what: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or sys.byteorder != "little":
            raise TensorFileError(
                f"{what}: {name} is {tensor.dtype}, allowed {', '.join(DTYPES)} on a little-endian CPU"
            )
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return text


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, each in memory of its own.

    Raises:
        TensorFileError: cannot be read, or is not of the format.
    """
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise TensorFileError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    return _decode(raw, str(path))


def decode_tensors(raw: Tensor, what: str) -> dict[str, Tensor]:
    """The inverse of `encode_tensors`; raises TensorFileError, which names `what`."""
    return _decode(raw.numpy(), what)


def _decode(raw: npt.NDArray[np.uint8], what: str) -> dict[str, Tensor]:
    length = int.from_bytes(raw[:_LENGTH_BYTES].tobytes(), "little")
    start = _LENGTH_BYTES + length
    if len(raw) < _LENGTH_BYTES or length > min(_LONGEST_HEADER, len(raw) - _LENGTH_BYTES):
        raise TensorFileError(f"{what}: is no safetensors file, or is cut short")
    try:
        header = json.loads(raw[_LENGTH_BYTES:start].tobytes())
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _tensor(raw[start:], entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorFileError(f"{what}: is no safetensors file, or is damaged ({error})") from error


def _tensor(data: npt.NDArray[np.uint8], entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(data) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{begin} to {end} does not hold {shape} of {entry['dtype']}")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.array(data[begin:end])).view(dtype).reshape(shape)
