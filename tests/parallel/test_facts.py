# SPDX-License-Identifier: Apache-2.0
"""The one answer that all ranks draw, which heads and blocks are whose, and handles as bytes."""

from __future__ import annotations

import dataclasses
import os
import re
import socket

import pytest
from parallel.tasks import repacked

from blockpick import PeerError, UnsupportedConfigError
from blockpick.parallel.board import Board
from blockpick.parallel.descriptors import DescriptorServer, fetch_descriptor
from blockpick.parallel.facts import RankFacts, agree
from blockpick.parallel.heads import HeadShare
from blockpick.parallel.wire import GRANULE, Handle

TOKEN = bytes(range(16))
FACTS = RankFacts(
    "0.1.0", (None, None, 5.0, 120.0), "boot", 1000, 11, ("ipc:[1]", "pid:[1]", "30:1"), "cuda", "GPU-0", "CUDA 13.0",
    132, ("ipc", "posix_fd", "fabric"), True,
)  # fmt: skip


def ranks(*changes):
    """Facts of four ranks, some with changes."""
    found = [dataclasses.replace(FACTS, process=rank, device=f"GPU-{rank}") for rank in range(4)]
    for rank, change in changes:
        found[rank] = dataclasses.replace(found[rank], **change)
    return found


def asked(transport=None, kind=None):
    """The same request on all ranks."""
    return [(rank, {"asked": (transport, kind, 5.0, 120.0)}) for rank in range(4)]


@pytest.mark.parametrize(
    "facts,transport,kind,reason",
    [
        (ranks(), "peer", "ipc", "all ranks can map each other's memory"),
        (ranks(*asked("collective")), "collective", None, "asked for"),
        (ranks(*asked("peer")), "peer", "ipc", "asked for"),
        (ranks(*asked(None, "posix_fd")), "peer", "posix_fd", "all ranks can map"),
        (ranks((2, {"node": "other"})), "collective", None, "ranks have different nodes"),
        (ranks((3, {"user": 0})), "collective", None, "ranks have different users"),
        (ranks((1, {"namespaces": ("ipc:[1]", "pid:[1]", "31:1")})), "collective", None, "different /dev/shm"),
        (ranks((1, {"namespaces": ("ipc:[2]", "pid:[1]", "30:1")})), "peer", "posix_fd", "all ranks can map"),
        (ranks((1, {"namespaces": ("ipc:[2]", "pid:[2]", "30:1")})), "peer", "fabric", "all ranks can map"),
        (ranks((0, {"kinds": ("posix_fd",)})), "peer", "posix_fd", "all ranks can map"),
        (ranks((2, {"kinds": ()})), "collective", None, "no kind of handle can be shared by all ranks"),
        (ranks((1, {"proven": False})), "collective", None, "peer memory was never run on cuda hardware"),
        (ranks((1, {"device": "GPU-0"})), "peer", "ipc", "ranks share a device and take turns"),
    ],
)
def test_one_answer_from_equal_facts(facts, transport, kind, reason):
    answer = agree(facts)
    assert (answer.transport, answer.kind) == (transport, kind)
    assert reason in answer.reason


def test_unproven_memory_is_used_when_asked_for():
    assert agree(ranks(*asked("peer"), (1, {"proven": False, "asked": ("peer", None, 5.0, 120.0)}))).transport == "peer"


@pytest.mark.parametrize(
    "change,told",
    [
        ({"version": "0.2.0"}, "ranks differ in version: '0.1.0' on rank 0, '0.2.0' on rank 2"),
        ({"asked": ("peer", None, 5.0, 120.0)}, "ranks differ in asked"),
        ({"vendor": "rocm"}, "ranks differ in vendor"),
        ({"compute_units": 78}, "ranks differ in compute_units: 132 on rank 0, 78 on rank 2"),
        ({"driver": "CUDA 12.8"}, "ranks differ in driver"),
    ],
)
def test_ranks_that_differ_are_refused(change, told):
    with pytest.raises(PeerError, match=re.escape(told)) as caught:
        agree(ranks((2, change)))
    assert caught.value.peer == 2


def test_peer_that_cannot_be_is_refused_when_asked_for():
    with pytest.raises(UnsupportedConfigError, match="transport='peer': ranks have different nodes"):
        agree(ranks(*asked("peer"), (2, {"node": "other", "asked": ("peer", None, 5.0, 120.0)})))
    with pytest.raises(UnsupportedConfigError, match="handle_kind='fabric' can't be shared; possible here: ipc"):
        agree(ranks(*[(r, {"kinds": ("ipc",), "asked": ("peer", "fabric", 5.0, 120.0)}) for r in range(4)]))


# ---- heads


@pytest.mark.parametrize(
    "size,heads,total,replicas,first",
    [
        (2, 2, None, 1, [0, 2]), (4, 1, None, 1, [0, 1, 2, 3]), (8, 1, None, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
        (16, 1, None, 4, [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4), (2, 4, None, 2, [0, 0]), (2, 1, None, 1, [0, 1]),
        (4, 1, 2, 2, [0, 0, 1, 1]),
    ],
)  # fmt: skip
def test_heads_over_ranks(size, heads, total, replicas, first):
    share = HeadShare.of(size, heads, total)
    assert share.replicas == replicas and [share.first_head(rank) for rank in range(size)] == first


@pytest.mark.parametrize("size,heads,total", [(3, 1, 4), (3, 2, None), (8, 2, 6), (2, 4, 2), (4, 2, 3)])
def test_heads_that_cannot_be_shared_evenly_are_refused(size, heads, total):
    with pytest.raises(UnsupportedConfigError, match=f"{size} ranks of num_heads={heads} can't share"):
        HeadShare.of(size, heads, total)


# ---- handles


def test_a_handle_survives_the_wire():
    handle = Handle("ipc", 3, 2 * GRANULE, TOKEN, b"p" * 64)
    assert Handle.parse(handle.pack(), 3, TOKEN, "ipc", 2 * GRANULE) == handle


@pytest.mark.parametrize("cut", range(0, 100, 7))
def test_every_truncation_is_refused(cut):
    data = Handle("ipc", 1, GRANULE, TOKEN, b"p" * 64).pack()
    with pytest.raises(PeerError, match=r"handle of rank 1: (truncated|malformed)"):
        Handle.parse(data[:cut], 1, TOKEN, "ipc", GRANULE)


def test_every_changed_byte_is_refused():
    data = Handle("ipc", 1, GRANULE, TOKEN, b"p" * 64).pack()
    for at in range(len(data)):
        with pytest.raises(PeerError, match="handle of rank 1"):
            Handle.parse(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :], 1, TOKEN, "ipc", GRANULE)


@pytest.mark.parametrize("size", [0, GRANULE + 1, 1 << 41])
def test_sizes_that_no_rank_exports_are_refused(size):
    data = repacked(Handle("ipc", 1, GRANULE, TOKEN, b"p" * 64).pack(), 12, size.to_bytes(8, "little"))
    with pytest.raises(PeerError, match="the group agreed on"):
        Handle.parse(data, 1, TOKEN, "ipc", size)


# ---- descriptors and the board


def test_a_stranger_gets_no_descriptor():
    """A process of the same user without the token, with a wrong rank, or that is not the one of its rank."""
    read, write = os.pipe()
    server = DescriptorServer(TOKEN, 0, [os.getpid(), os.getpid(), 1])
    try:
        server.serve(read, 5.0)
        for token, rank in ((b"x" * 16, 1), (TOKEN, 7), (TOKEN, 2)):
            with pytest.raises(PeerError, match="rank 0: sent no descriptor"):
                fetch_descriptor(server.path, token, rank, 0, os.getpid(), 5.0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(server.path)
            raw.send(b"short")
            assert raw.recv(64) == b""
        descriptor = fetch_descriptor(server.path, TOKEN, 1, 0, os.getpid(), 5.0)
        assert os.path.samestat(os.fstat(descriptor), os.fstat(read))
        os.close(descriptor)
        assert len(server.refused) == 4
    finally:
        server.close()
        os.close(read)
        os.close(write)
    assert not os.path.exists(os.path.dirname(server.path))


def test_an_impostor_is_not_asked():
    server = DescriptorServer(TOKEN, 0, [os.getpid(), os.getpid()])
    try:
        server.serve(0, 5.0)
        with pytest.raises(PeerError, match=f"process {os.getpid()} of user {os.getuid()} answers in its place"):
            fetch_descriptor(server.path, TOKEN, 1, 0, os.getpid() + 1, 5.0)
    finally:
        server.close()


def test_the_board_leaves_no_file_and_tells_of_aborts():
    name = f"blockpick-test-{os.getpid()}"
    ours, theirs = Board(name, 2, 0, True), Board(name, 2, 1, False)
    ours.unlink()
    assert not os.path.exists(f"/dev/shm/{name}")
    assert ours.aborted() is None and ours.dead() == []
    theirs.abort("out of memory " + "x" * 2000)
    rank, reason = ours.aborted()
    assert rank == 1 and reason.startswith("out of memory xxx") and len(reason) < 512
    theirs.let_go()
    assert ours.wait_until_let_go(1, 0.01) == [0]
    ours.let_go()
    assert ours.wait_until_let_go(1, 0.01) == []
    ours.close()
    theirs.close()


def test_a_board_of_another_size_is_refused():
    name = f"blockpick-test-size-{os.getpid()}"
    board = Board(name, 2, 0, True)
    try:
        with pytest.raises(PeerError, match="another size than 4 ranks need"):
            Board(name, 4, 1, False)
        with pytest.raises(FileExistsError):
            Board(name, 2, 0, True)
    finally:
        board.unlink()
        board.close()
