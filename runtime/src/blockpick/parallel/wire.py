# SPDX-License-Identifier: Apache-2.0
"""The exported handle as ranks send it: magic, version, kind, owner, size, group token, payload, checksum."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from ..errors import PeerError

KINDS = ("ipc", "posix_fd", "fabric")
GRANULE = 2 << 20  # exported allocations are whole multiples: legacy IPC exports the whole underlying block
MAX_PAYLOAD = 256
TOKEN_BYTES = 16
MAX_BYTES = 1 << 40
_HEAD = struct.Struct("<4sHHIQ16sI")
_TAIL = struct.Struct("<I")
_MAGIC, _VERSION = b"BPKH", 1


@dataclass(frozen=True)
class Handle:
    """What a rank tells the others about an allocation of its own.

    Attributes
    ----------
    kind : {"ipc", "posix_fd", "fabric"}
        How it is opened.
    owner : int
        The exporting rank.
    size : int
        Bytes, a whole multiple of 2 MiB.
    token : bytes
        16 random bytes of the group: handles of other groups are foreign.
    payload : bytes
        The driver's handle.
    """

    kind: str
    owner: int
    size: int
    token: bytes
    payload: bytes

    def pack(self) -> bytes:
        """The bytes to send."""
        head = _HEAD.pack(
            _MAGIC, _VERSION, KINDS.index(self.kind), self.owner, self.size, self.token, len(self.payload)
        )
        return head + self.payload + _TAIL.pack(zlib.crc32(head + self.payload))

    @classmethod
    def parse(cls, data: object, sender: int, token: bytes, kind: str, size: int) -> Handle:
        """The handle in ``data``, which came from rank ``sender``.

        Raises
        ------
        PeerError
            When it is malformed, truncated, oversized, of another owner, group, kind or size.
        """

        def refuse(what: str) -> PeerError:
            return PeerError(f"handle of rank {sender}: {what}", sender)

        if not isinstance(data, bytes):
            raise refuse(f"must be bytes, is {type(data).__name__}")
        if len(data) < _HEAD.size + _TAIL.size:
            raise refuse(f"truncated: {len(data)} bytes, at least {_HEAD.size + _TAIL.size} are needed")
        magic, version, code, owner, found_size, found_token, length = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise refuse(f"malformed: starts with {magic!r}, not {_MAGIC!r}")
        if version != _VERSION:
            raise refuse(f"version {version}, this blockpick reads {_VERSION}; run one release on all ranks")
        expected = _HEAD.size + length + _TAIL.size
        if length > MAX_PAYLOAD or len(data) > expected:
            raise refuse(f"oversized: {len(data)} bytes with a payload of {length}, at most {MAX_PAYLOAD} are allowed")
        if len(data) < expected:
            raise refuse(f"truncated: {len(data)} of {expected} bytes")
        if zlib.crc32(data[: -_TAIL.size]) != _TAIL.unpack_from(data, len(data) - _TAIL.size)[0]:
            raise refuse("malformed: its checksum differs")
        if found_token != token:
            raise refuse("foreign: it belongs to another group")
        if owner != sender:
            raise refuse(f"foreign: it names rank {owner} as its owner")
        if code >= len(KINDS) or KINDS[code] != kind:
            raise refuse(f"kind {KINDS[code] if code < len(KINDS) else code}, the group agreed on {kind}")
        if found_size != size or size % GRANULE or not 0 < size <= MAX_BYTES:
            raise refuse(f"{found_size} bytes, the group agreed on {size}, a whole multiple of {GRANULE}")
        return cls(kind, owner, found_size, found_token, data[_HEAD.size : -_TAIL.size])
