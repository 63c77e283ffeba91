"""The system calls that sandboxed code never needs, refused by a small BPF program.

The namespaces do the isolating; this narrows the kernel that can be attacked, and closes two holes they leave: memory
that belongs to no process's resident size (memfd, System V shared memory), and socket families that no network
namespace contains (vsock).
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

from treadle.errors import SandboxUnavailable

# name: (number on x86_64, number on aarch64)
REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "fanotify_init": (300, 262), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "unshare": (272, 97), "setns": (308, 268),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "quotactl": (179, 60), "syslog": (103, 116), "personality": (135, 92), "vmsplice": (278, 75),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
X32_BIT = 0x40000000

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF operations
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, KILL = 0x7FFF0000, 0x80000000


def _op(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; `then` and `otherwise` say how many instructions to skip."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _refuse(number: int) -> bytes:
    return _op(RETURN, 0x00050000 | number)


def seccomp_program(machine: str = "") -> bytes:
    """The filter as bytes for `bwrap --seccomp`. SandboxUnavailable on a machine whose system calls aren't listed."""
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        raise SandboxUnavailable(f"no system-call filter for {machine!r}: known are {', '.join(sorted(AUDIT_ARCH))}")
    column = list(AUDIT_ARCH).index(machine)
    program = [_op(LOAD, ARCH), _op(EQUAL, AUDIT_ARCH[machine], then=1), _op(RETURN, KILL), _op(LOAD, NUMBER)]
    if machine == "x86_64":
        program += [_op(AT_LEAST, X32_BIT, otherwise=1), _refuse(errno.EPERM)]
    for numbers in REFUSED.values():
        program += [_op(EQUAL, numbers[column], otherwise=1), _refuse(errno.EPERM)]
    # Its flags lie behind a pointer, out of a filter's reach; told that it doesn't exist, libc falls back to clone.
    program += [_op(EQUAL, CLONE3[column], otherwise=1), _refuse(errno.ENOSYS)]
    program += [
        _op(EQUAL, CLONE[column], otherwise=3), _op(LOAD, FIRST_ARGUMENT),
        _op(ANY_BIT, NEW_NAMESPACES, otherwise=2), _refuse(errno.EPERM),
        _op(EQUAL, SOCKET[column], then=1), _op(RETURN, ALLOW), _op(LOAD, FIRST_ARGUMENT),
        _op(EQUAL, socket.AF_UNIX, then=3), _op(EQUAL, socket.AF_INET, then=2), _op(EQUAL, socket.AF_INET6, then=1),
        _refuse(errno.EAFNOSUPPORT), _op(RETURN, ALLOW),
    ]  # fmt: skip
    return b"".join(program)
