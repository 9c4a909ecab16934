"""A virtual machine with Debian's stock kernel on this machine's own file system, for kernels without netem.

``python tests/vm/machine.py`` installs what is missing (as root, by apt) and says how long that took. The kernel
and its modules are unpacked into ``.cache/vm`` and nowhere else. The guest sees this machine's files read-only
through 9p, with a memory file system laid over them for what it writes; only one folder, the results, is shared
for writing. The processor is emulated in software, so no KVM is needed and results are slow but repeatable.
"""

import fcntl
import lzma
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
CACHE = PROJECT / ".cache" / "vm"
KERNEL = CACHE / "kernel"
TOOLS = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "modprobe": "kmod"}
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
SHARE = "/vm-results"
APT_TIMEOUT_S = 300
MEMORY = "2G"
CPUS = 2

_FIRST_INIT = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev
for module in $($b cat /modules/order); do $b insmod /modules/$module; done
$b mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000 root /low
$b mount -t tmpfs -o mode=0755 top /top
$b mkdir /top/upper /top/work
$b mount -t overlay -o lowerdir=/low,upperdir=/top/upper,workdir=/top/work overlay /new
$b mkdir -p /new@SHARE@ /new/lib/modules
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 results /new@SHARE@
$b mount --bind '/new@MODULES@' /new/lib/modules
$b mount -t tmpfs -o mode=0755 run /new/run
for name in proc dev; do $b mount --move /$name /new/$name; done
$b mount -t sysfs sys /new/sys
$b mount -t cgroup2 none /new/sys/fs/cgroup
$b mkdir -p /new/dev/pts /new/dev/shm
$b mount -t devpts -o ptmxmode=0666 pts /new/dev/pts
$b mount -t tmpfs shm /new/dev/shm
exec $b switch_root /new /bin/busybox sh @SHARE@/init
"""

_SECOND_INIT = """export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
b=/bin/busybox
ip link set lo up
cd '@PROJECT@'
$b timeout -s KILL @LIMIT@ '@PYTHON@' '@SCRIPT@' @SHARE@ >@SHARE@/output 2>&1
echo $? >@SHARE@/status
$b dmesg >@SHARE@/dmesg
$b sync
$b poweroff -f
"""


class VmError(Exception):
    """The virtual machine could not be prepared, or did not do what it was started for."""


def why_not() -> str | None:
    """Why this machine cannot run the virtual machine, as a sentence; None when it can."""
    if os.geteuid() != 0:
        return "the virtual machine needs root: its guest reads this machine's files, and apt installs QEMU"
    if platform.machine() != "x86_64":
        return f"the virtual machine boots an amd64 kernel, this is {platform.machine()}"
    release = Path("/etc/os-release")
    lines = release.read_text(encoding="utf-8").splitlines() if release.exists() else []
    if "ID=debian" not in lines or not shutil.which("apt-get"):
        return "the virtual machine boots Debian's kernel package: needs Debian with apt"
    return None


def _apt(*arguments: str, cwd: Path | None = None) -> None:
    command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", "-o", "APT::Sandbox::User=root", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=APT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise VmError(f"apt-get {' '.join(arguments)}: no end within {APT_TIMEOUT_S} s") from error
    if done.returncode:
        raise VmError(f"apt-get {' '.join(arguments)}: {(done.stderr or done.stdout).strip()[-500:]}")


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@contextmanager
def _only_one() -> Iterator[None]:
    """Two sessions at once must not unpack into the same folder."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install() -> str:
    """Installs and unpacks what is missing; returns the kernel's version. Quick when nothing is missing."""
    with _only_one():
        missing = [package for tool, package in TOOLS.items() if not shutil.which(tool)]
        ready = (KERNEL / "version").exists()
        if missing or not ready:
            _apt("update")
        if missing:
            _apt("install", "-y", "--no-install-recommends", *missing)
        if not ready:
            _unpack_kernel()
        return (KERNEL / "version").read_text(encoding="utf-8")


def _unpack_kernel() -> None:
    depends = _said("apt-cache", "depends", "linux-image-amd64").split()
    names = [word for word in depends if word.startswith("linux-image-") and word != "linux-image-amd64"]
    if not names:
        raise VmError("apt knows no kernel behind linux-image-amd64")
    shutil.rmtree(KERNEL, ignore_errors=True)
    KERNEL.mkdir()
    _apt("download", names[0], cwd=KERNEL)
    for archive in KERNEL.glob("*.deb"):
        subprocess.run(["dpkg", "-x", archive, KERNEL], timeout=120, check=True)
        archive.unlink()
    modules = _module_root()
    (version,) = (folder.name for folder in modules.iterdir())
    subprocess.run(["depmod", "-b", modules.parents[1], version], timeout=120, check=True)
    (KERNEL / "version").write_text(version, encoding="utf-8")


def _module_root() -> Path:
    return next(path for path in (KERNEL / "lib/modules", KERNEL / "usr/lib/modules") if path.is_dir())


def _initramfs(version: str) -> bytes:
    """A newc archive: busybox, the modules that reach this machine's files, and the first init."""
    files = {"bin/busybox": Path(shutil.which("busybox") or "busybox").read_bytes()}
    base = _module_root().parents[1]
    order: list[str] = []
    for name in MODULES:
        for line in _said("modprobe", "-d", str(base), "-S", version, "--show-depends", name).splitlines():
            words = line.split()
            if words[0] != "insmod":  # built in
                continue
            data = Path(words[1]).read_bytes()
            packed = words[1].endswith(".xz")
            files[f"modules/{Path(words[1]).name}"] = lzma.decompress(data) if packed else data
            if Path(words[1]).name not in order:
                order.append(Path(words[1]).name)
    files["modules/order"] = "\n".join(order).encode()
    files["init"] = _FIRST_INIT.replace("@SHARE@", SHARE).replace("@MODULES@", str(_module_root())).encode()
    entries = [(name, 0o040755, b"") for name in ("bin", "modules", "proc", "dev", "low", "top", "new")]
    entries += [(name, 0o100755, data) for name, data in files.items()]
    return b"".join(_cpio(n, *entry) for n, entry in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1))


def _cpio(inode: int, name: str, mode: int, data: bytes) -> bytes:
    fields = [inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def boot(script: Path, results: Path, limit_s: int) -> float:
    """Boots, runs ``script RESULTS`` with this Python as root inside, and waits for the shut-down.

    The exit status of the script (``status``), what it said (``output``), the kernel's messages (``dmesg``) and the
    console are files in ``results``, beside what the script itself wrote there.

    Returns:
        Seconds from start to shut-down.

    Raises:
        VmError: the guest did not come as far as the script's end within the limit, or the script failed.
    """
    version = install()
    results.mkdir(parents=True, exist_ok=True)
    initramfs = results / "initramfs"
    initramfs.write_bytes(_initramfs(version))
    init = _SECOND_INIT
    for key, value in {
        "SHARE": SHARE,
        "PROJECT": PROJECT,
        "PYTHON": sys.executable,
        "SCRIPT": script,
        "LIMIT": limit_s,
    }.items():
        init = init.replace(f"@{key}@", str(value))
    (results / "init").write_text(init, encoding="utf-8")
    console = results / "console"
    command = ["setpriv", "--pdeathsig", "KILL", "nice", "-n", "10", "qemu-system-x86_64"]
    command += ["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(CPUS), "-m", MEMORY]
    command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    command += ["-serial", f"file:{console}", "-kernel", str(KERNEL / "boot" / f"vmlinuz-{version}")]
    command += ["-initrd", str(initramfs), "-append", "console=ttyS0 panic=-1 loglevel=4 mitigations=off"]
    for tag, path, options in (("root", "/", ",readonly=on,multidevs=remap"), ("results", results, "")):
        command += ["-fsdev", f"local,id={tag},path={path},security_model=none{options}"]
        command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s + 60,
            check=False,
        )
        said = done.stderr.strip()
    except subprocess.TimeoutExpired:
        said = f"no shut-down within {limit_s + 60} s"
    seconds = time.monotonic() - began
    initramfs.unlink()
    status = results / "status"
    if not status.exists():
        raise VmError(f"the guest did not finish: {said}\n{_tail(console)}")
    if (code := status.read_text(encoding="utf-8").strip()) != "0":
        raise VmError(f"{script.name} ended with status {code} in the guest:\n{_tail(results / 'output')}")
    return seconds


def _tail(path: Path, lines: int = 30) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else "(nothing)"
    return "\n".join(text.splitlines()[-lines:])


def main() -> int:
    """Installs, or says why this machine cannot."""
    if reason := why_not():
        print(f"vm: {reason}", file=sys.stderr)
        return 1
    began = time.monotonic()
    try:
        version = install()
    except VmError as error:
        print(f"vm: {error}", file=sys.stderr)
        return 1
    print(f"vm: Debian's kernel {version} is ready ({time.monotonic() - began:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
