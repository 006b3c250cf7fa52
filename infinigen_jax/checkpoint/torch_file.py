"""Reader of `pytorch_model.bin` that needs no torch and runs no code of the file.

A torch file is a zip archive: `<top>/data.pkl` describes the tensors, and `<top>/data/<key>` are
raw storages. They are stored without compression, so they can be memory-mapped.
"""

import math
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from infinigen_jax.checkpoint.torch_pickle import Refused, Storage, TorchTensor, read_pickle
from infinigen_jax.errors import InputError
from infinigen_jax.files.mapped import map_file
from infinigen_jax.files.regular import open_regular

LARGEST_PICKLE = 32 << 20  # bytes; 100,000 tensors take 15 MB


class TorchFile:
    """Tensors of a torch file; `read` returns read-only views of the mapped file."""

    def __init__(self, path: Path):
        self.path = path
        self._map = map_file(path)
        self._checked: set[str] = set()  # storages with a verified checksum
        try:
            with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                self._entries = {entry.filename: entry for entry in archive.infolist()}
                pickled = next(name for name in self._entries if name.endswith("data.pkl"))
                self._top = pickled.removesuffix("data.pkl")
                order = f"{self._top}byteorder"
                self._check_size(pickled, LARGEST_PICKLE)
                self._check_size(order, len("little"))
                data = archive.read(pickled)
                big_endian = order in self._entries and archive.read(order) != b"little"
        except InputError:
            raise
        except Exception as error:  # zipfile raises many types for damaged archives
            raise self._unreadable(error) from None
        if big_endian:
            raise InputError(
                f"{path}: big-endian, which is not supported; save it again with torch"
            )
        self.tensors = self._unpickle(data)

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in its stored dtype, not necessarily contiguous."""
        tensor = self.tensors[name]
        flat = self._storage(tensor.storage, name)
        last = tensor.offset + sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True)
        )
        count = math.prod(tensor.shape)
        if tensor.offset > flat.size or (count and last >= flat.size):
            raise InputError(f"{self.path}: {name} reaches outside its storage; get the file again")
        if count > flat.size:  # zero strides make any size of a few bytes
            raise InputError(f"{self.path}: {name} repeats its storage; save its copy with torch")
        itemsize = flat.dtype.itemsize
        view = np.lib.stride_tricks.as_strided(
            flat[tensor.offset :],
            tensor.shape,
            tuple(stride * itemsize for stride in tensor.strides),
            writeable=False,
        )
        return view

    def _storage(self, storage: Storage, name: str) -> np.ndarray:
        entry = self._entries.get(f"{self._top}data/{storage.key}")
        if entry is None:
            raise InputError(f"{self.path}: the data of {name} is missing; get it again")
        # A local header is 30 bytes plus a name and an extra field. Torch pads the extra field to
        # align the data, so its length can differ from the one in the central directory.
        header = self._map[entry.header_offset : entry.header_offset + 30]
        begin = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:30].ljust(4)))
        size = storage.count * storage.dtype.itemsize
        if entry.compress_type != zipfile.ZIP_STORED:
            raise InputError(f"{self.path}: {name} is compressed; save the model again with torch")
        if size > min(entry.file_size, len(self._map) - begin):
            raise InputError(f"{self.path}: the data of {name} is truncated; get the file again")
        if storage.key not in self._checked:
            with memoryview(self._map)[begin : begin + entry.file_size] as stored:
                if zlib.crc32(stored) != entry.CRC:
                    raise InputError(f"{self.path}: {name} is damaged; get the file again")
            self._checked.add(storage.key)
        return np.frombuffer(self._map, storage.dtype, count=storage.count, offset=begin)

    def _unpickle(self, data: bytes) -> dict[str, TorchTensor]:
        try:
            value = read_pickle(data)
        except Refused as error:
            raise InputError(f"{self.path}: {error}") from None
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise InputError(f"{self.path}: damaged ({error}); get the file again") from None
        if not isinstance(value, dict):
            raise InputError(f"{self.path}: holds no dictionary of tensors; not a model file")
        for name, tensor in dict.items(value):  # a pickle may have set an attribute `items`
            if not isinstance(tensor, TorchTensor):
                raise InputError(f"{self.path}: {name!r} is not a tensor; not a model file")
        return dict(value)

    def _check_size(self, member: str, most: int) -> None:
        """Refuse compression, which torch does not use, and members larger than `most` bytes."""
        entry = self._entries.get(member)
        if entry is None:
            return
        if entry.compress_type != zipfile.ZIP_STORED:
            raise InputError(f"{self.path}: compressed; save the model again with torch")
        if entry.file_size > most:
            raise InputError(
                f"{self.path}: {member} has {entry.file_size:,} bytes, more than {most:,}; "
                "save the model again with torch"
            )

    def _unreadable(self, error: Exception) -> InputError:
        start = bytes(self._map[:64])
        if start.startswith(b"version https://git-lfs"):
            why = "it is a Git LFS pointer: fetch the real file with `git lfs pull`"
        elif start.startswith(b"\x80"):
            why = "it is in torch's format from before 1.6: load it and save it again with torch"
        else:
            why = f"it is truncated or of another format ({error}); get it again"
        return InputError(f"{self.path}: not a torch zip file, {why}")
