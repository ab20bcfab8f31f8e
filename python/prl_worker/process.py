"""What a template does to processes: fork one whose parent is the orchestrator, give it limits and namespaces of its own, as src/env/python/sandbox.cpp
does for a process that is started by exec."""

import ctypes
import os
import platform
import resource
import signal

_CLONE = {"x86_64": 56, "aarch64": 220}  # numbers of the system call
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_GET_TID_ADDRESS = 1, 4, 15, 24, 38, 40
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24
_CAPABILITY_VERSION_3 = 0x20080522
_PROT_READ, _PROT_WRITE = 1, 2
_CPU_SPARE = 2  # seconds from SIGXCPU to SIGKILL
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8913, 0x8914, 0x1, 0x40

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock


class CannotFork(Exception):
    pass


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def set_name(name: str) -> None:
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def threads() -> list[str]:
    """Names of the threads of this process but the first, libraries' own too."""
    names = []
    for task in os.listdir("/proc/self/task"):
        if int(task) == os.getpid():
            continue
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except OSError:  # it has ended
            pass
    return names


def children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def descriptors() -> dict[int, str]:
    """What the open ones are, but for devices, which processes may share."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # that of the listing itself
            continue
        if not target.startswith("/dev/"):
            found[int(fd)] = target
    return found


def _is_writable(address: int) -> bool:
    with open("/proc/self/maps") as file:
        for line in file:
            begin, _, end = line.split()[0].partition("-")
            if int(begin, 16) <= address < int(end, 16):
                return "w" in line.split()[1]
    return False


def heed_variables() -> None:
    """Programs whose real user id is another than the effective one count as set-user-id programs, and libraries then do not look at variables
    (secure_getenv). The workers of root have another one for their count of processes alone, and the variable that keeps pyarrow from starting a thread must
    be heeded. glibc decides at the start of the program and keeps the answer in memory that is read-only from then on; without that symbol nothing is done."""
    if os.getuid() == os.geteuid():
        return
    try:
        answer = ctypes.c_int.in_dll(_libc, "__libc_enable_secure")
    except ValueError:
        return
    address, page = ctypes.addressof(answer), resource.getpagesize()
    start = ctypes.c_void_p(address // page * page)
    was_writable = _is_writable(address)
    if was_writable or _libc.mprotect(start, page, _PROT_READ | _PROT_WRITE) == 0:
        answer.value = 0
        if not was_writable:
            _libc.mprotect(start, page, _PROT_READ)


def _tid_address() -> int:
    address = ctypes.c_void_p()
    _check(_libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0), "prctl(PR_GET_TID_ADDRESS)")
    return address.value or 0


def fork_sibling() -> int:
    """As os.fork, but the child's parent is this process's: it waits for it and may kill its group, and its end is the child's (die_with). Handlers that C
    libraries have registered with pthread_atfork do not run; with one thread there is nothing for them to do. Raises CannotFork."""
    number = _CLONE.get(platform.machine())
    try:
        if number is None or not os.confstr("CS_GNU_LIBC_VERSION"):
            raise CannotFork(f"{platform.machine()} without glibc")
        if names := threads():
            raise CannotFork(f"there are threads: {', '.join(names)}")
        # The C library keeps the thread's number in memory; the kernel writes the child's there, and clears it at its end, as after fork().
        tid = _tid_address()
    except (OSError, ValueError) as error:
        raise CannotFork(str(error)) from None
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    tail = (tid, 0) if number == 56 else (0, tid)
    arguments = [ctypes.c_long(value) for value in (number, flags, 0, 0, *tail)]
    call, before, parent, child = _held.syscall, ctypes.pythonapi.PyOS_BeforeFork, ctypes.pythonapi.PyOS_AfterFork_Parent, ctypes.pythonapi.PyOS_AfterFork_Child
    call.restype = ctypes.c_long
    before.restype = parent.restype = child.restype = None
    before()
    pid = call(*arguments)
    if pid == 0:
        child()
        return 0
    parent()
    if pid < 0:
        raise CannotFork(f"clone: {os.strerror(ctypes.get_errno())}")
    return pid


def die_with(parent: int) -> None:
    """SIGKILL for this process when the parent's thread that made it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(127)


def _limit(kind: int, wanted: int, spare: int = 0) -> None:
    if wanted <= 0:
        return
    most = resource.getrlimit(kind)[1]
    bounded = (lambda value: value) if most == resource.RLIM_INFINITY else (lambda value: min(value, most))
    resource.setrlimit(kind, (bounded(wanted), bounded(wanted + spare)))


def _drop_capabilities(every: bool) -> None:
    """For this process and what it executes: exec gives none that are outside of the bounding set, but there is none here."""
    for capability in range(64):
        if not every and capability not in (_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE):
            continue
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            if ctypes.get_errno() == 22:  # no such capability
                break
            _check(-1, "prctl(PR_CAPBSET_DROP)")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of the first 32, then of the others
    _check(_libc.capget(header, held), "capget")
    left = (0, 0) if every else (~(1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE) & 0xFFFFFFFF, 0xFFFFFFFF)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)(*(held[i] & left[i // 3] for i in range(6)))), "capset")


def _bring_up_loopback() -> None:
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = bytearray(struct.pack("16sh22x", b"lo", 0))
        fcntl.ioctl(sock, _SIOCGIFFLAGS, request)
        flags = struct.unpack_from("h", request, 16)[0] | _IFF_UP | _IFF_RUNNING
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _enter_namespace(namespace: dict) -> None:
    """A user and a network namespace inside of the template's: what listens in one worker is not seen by others."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")  # /proc/self stays writable
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET), "a user and a network namespace")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", namespace["uid_map"])
    _write("/proc/self/gid_map", namespace["gid_map"])
    _bring_up_loopback()
    _drop_capabilities(True)


def enter(limits: dict, namespace: dict | None, counted_uid: int) -> None:
    """Limits and namespaces of a worker; those that the template has hold already."""
    _limit(resource.RLIMIT_AS, limits.get("memory_bytes") or 0)
    _limit(resource.RLIMIT_NOFILE, limits.get("files") or 0)
    _limit(resource.RLIMIT_CPU, limits.get("cpu_seconds") or 0, _CPU_SPARE)
    if namespace is not None:
        _enter_namespace(namespace)
    elif counted_uid:
        os.setresuid(counted_uid, 0, 0)
        _drop_capabilities(False)
    # Not before the namespace is made: the limit would also bind the count of its owner's processes outside.
    _limit(resource.RLIMIT_NPROC, limits.get("processes") or 0)
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
