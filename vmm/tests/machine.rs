//! A machine of KVM with its devices, without a cell around it, on an emulated host that runs
//! virtual machines; the host's own KVM is not used. One program has three parts, each the first
//! process of its kernel but for the first:
//!
//! ```text
//! test (here) -> emulator: host kernel -> `host` -> KVM: guest kernel -> `guest`
//! ```
//! What the guest finds comes by its console, which is the host's standard output. Nothing here
//! asks for time: emulated twice, a guest is hundreds of times slower.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use exocell_pager::Mode;
use exocell_vmm::devices::{
    BlockConfig, ConsoleConfig, Contents, DeviceLoop, Metrics, VsockConfig,
};
use exocell_vmm::intra::Intra;
use exocell_vmm::kvm::KvmPlatform;
use exocell_vmm::limits::Limits;
use exocell_vmm::memory::GuestMemory;
use exocell_vmm::platform::{DeviceSocket, GuestKernel, INITRAMFS_FILE, KERNEL_FILE};
use exocell_vmm::platform::{Platform, VirtioId};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode as FileMode, SFlag, makedev, mknod};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::ForkResult;

const EMULATOR: &str = "EXOCELL_TEST_EMULATOR";
const HOST_KERNEL: &str = "EXOCELL_TEST_HOST";
const GUEST_KERNEL: &str = "EXOCELL_TEST_KVM_KERNEL";
/// How the host is told which part it has.
const HOST_WORD: &str = "exocell_machine_host";
/// Of the guest's memory, processors and disk.
const MEMORY_BYTES: u64 = 192 << 20;
const VCPUS: u32 = 2;
const DISK: &str = "/disk.img";
const DISK_BYTES: u64 = 1 << 20;
const READ: &[u8; 16] = b"what a host puts";
const WRITTEN: &[u8; 16] = b"what a guest has";
const WRITTEN_AT: u64 = 4096;
/// Half an hour.
const LIMIT_SECONDS: &str = "1800";
/// With SMAP an iret of a program fails (seen with QEMU 7.2).
const CPU: &str = "max,-smap,+svm,+npt";

fn main() {
    if std::process::id() != 1 {
        return test();
    }
    let is_host = command_line().contains(HOST_WORD);
    for (kind, at) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        let _ = mount(Some(kind), at, Some(kind), MsFlags::empty(), None::<&str>);
    }
    load_modules();
    let _ = std::panic::catch_unwind(if is_host { host } else { guest });
    nix::unistd::sync();
    let how = if is_host { libc::RB_POWER_OFF } else { libc::RB_AUTOBOOT };
    // SAFETY: the call takes a number; nothing of this program is left to be done.
    unsafe { libc::reboot(how) };
    panic!("the kernel goes on");
}

/// The kernel's; it is read before /proc is there for anybody else.
fn command_line() -> String {
    let _ = fs::create_dir("/proc");
    let _ = mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), None::<&str>);
    fs::read_to_string("/proc/cmdline").unwrap_or_default()
}

/// What lies in `/modules`, in the order of names. A kernel of ours has none.
fn load_modules() {
    let entries = fs::read_dir("/modules").into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    for path in files {
        let file = File::open(&path).expect("a module");
        // SAFETY: the call takes a descriptor, an empty text and flags. Needed: nothing wraps it.
        let loaded =
            unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
        println!("module {}: {loaded}", path.display());
    }
}

/// Starts the emulator, and looks at what it writes.
fn test() {
    let named = |variable| std::env::var_os(variable).filter(|path| !path.is_empty());
    let (Some(emulator), Some(host), Some(guest)) =
        (named(EMULATOR), named(HOST_KERNEL), named(GUEST_KERNEL))
    else {
        return eprintln!(
            "skipped: no emulator of virtual machines (scripts/emulator), no kernel for its host \
             (scripts/emulated-host) or for them (exocell kernel build --platform kvm)"
        );
    };
    let (host, guest) = (PathBuf::from(host), PathBuf::from(guest));
    let dir = tempfile::tempdir().expect("a folder");
    let [inner, outer] = ["guest", "host"].map(|name| dir.path().join(name));
    root(&inner, &guest);
    root(&outer, &host);
    pack(&inner, &outer.join(INITRAMFS_FILE));
    fs::copy(&guest, outer.join(KERNEL_FILE)).expect("the guest's kernel");
    let disk = File::create(outer.join(&DISK[1..])).expect("a disk");
    disk.set_len(DISK_BYTES).expect("a disk");
    disk.write_all_at(READ, 0).expect("a disk");
    let archive = dir.path().join("archive");
    pack(&outer, &archive);
    let output = Command::new("timeout")
        .arg(LIMIT_SECONDS)
        .arg(emulator)
        .args(["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", "2", "-m", "1536"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"])
        .args(["-no-reboot", "-append"])
        .arg(format!("console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable {HOST_WORD}"))
        .arg("-kernel")
        .arg(&host)
        .arg("-initrd")
        .arg(&archive)
        .stdin(Stdio::null())
        .output()
        .expect("the emulator");
    let said = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    for wanted in [
        "guest: disk reads as it is",
        "guest: entropy",
        // By the MP table, which Debian's kernel does not know.
        "guest: processors 0-1",
        "guest: clock kvm-clock",
        "guest: registers that its kernel missed: 0",
        "host: the guest ended with 0",
        "host: the disk has what was written",
        "host: nothing was malformed",
    ] {
        assert!(said.contains(wanted), "{wanted}: not in\n{said}");
    }
    println!("a machine of KVM starts, has its devices and ends");
}

/// A root with this program as the first one, and the modules beside its kernel.
fn root(root: &Path, kernel: &Path) {
    for folder in ["dev", "proc", "sys", "modules"] {
        fs::create_dir_all(root.join(folder)).expect("a folder");
    }
    let own = std::env::current_exe().expect("this program");
    // Until there is more: a program without standard streams wants the second one.
    for (name, minor, major) in [("dev/console", 1, 5), ("dev/null", 3, 1)] {
        let mode = FileMode::from_bits_truncate(0o600);
        mknod(&root.join(name), SFlag::S_IFCHR, mode, makedev(major, minor)).expect("as root");
    }
    let strip = Command::new("strip").arg("-o").arg(root.join("init")).arg(&own).status();
    assert!(strip.expect("strip").success());
    let listed = Command::new("ldd").arg(&own).output().expect("ldd").stdout;
    let listed = String::from_utf8_lossy(&listed);
    for path in listed.split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(&path[1..]);
        fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
        fs::copy(path, to).expect("a library");
    }
    let mut modules = kernel.as_os_str().to_owned();
    modules.push("-modules");
    for entry in fs::read_dir(&modules).into_iter().flatten().flatten() {
        fs::copy(entry.path(), root.join("modules").join(entry.file_name())).expect("a module");
    }
}

/// As kernels take it.
fn pack(folder: &Path, archive: &Path) {
    let script = "find . | LC_ALL=C sort | cpio --quiet -o -H newc > \"$0\"";
    let status = Command::new("sh").args(["-c", script]).arg(archive).current_dir(folder).status();
    assert!(status.expect("sh").success(), "cpio is installed by scripts/setup");
}

/// Passes on what the guest's console says.
struct Heard;

impl Write for Heard {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        std::io::stdout().write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stdout().flush()
    }
}

/// Makes the machine, and serves its devices.
fn host() {
    // With one thread: what goes on as the guest is a copy.
    let memory = GuestMemory::new(MEMORY_BYTES).expect("memory");
    let names = [
        ("console", VirtioId::Console),
        ("entropy", VirtioId::Entropy),
        ("disk", VirtioId::Block),
        ("vsock", VirtioId::Vsock),
    ];
    let listen = |name: &str| UnixListener::bind(format!("/{name}")).expect("a socket");
    let listeners: Vec<_> = names.iter().map(|(name, _)| listen(name)).collect();
    let socket = |&(name, id): &(&str, VirtioId)| DeviceSocket { name: name.to_owned(), id };
    let sockets: Vec<_> = names.iter().map(socket).collect();
    let platform = KvmPlatform::open().expect("KVM");
    let console = std::io::stdout();
    let kernel = GuestKernel {
        memory: &memory,
        vcpus: VCPUS,
        pager: Mode::Off,
        blocks: false,
        mappings_max: None,
        lender: None,
        intra: Intra::Aspace,
        devices: &sockets,
        image: None,
        console: console.as_fd(),
        identity: 0,
        limits: Limits::new(memory.bytes(), 64),
        group: None,
    };
    // SAFETY: there is one thread, so the child may do what any process may.
    let child = match unsafe { nix::unistd::fork() }.expect("fork") {
        ForkResult::Child => {
            println!("host: no guest: {}", platform.become_guest(&kernel));
            std::process::exit(99)
        }
        ForkResult::Parent { child } => child,
    };
    let mut devices = DeviceLoop::for_machine(memory.file()).expect("devices");
    let mut counted: Vec<Arc<dyn Metrics>> = Vec::new();
    for ((_, id), listener) in names.iter().zip(listeners) {
        counted.push(match id {
            VirtioId::Console => {
                let sink = Box::new(Heard);
                let config = ConsoleConfig { sink, output_bytes_max: u64::MAX, input: None };
                devices.add_console(listener, config).expect("a console")
            }
            VirtioId::Entropy => devices.add_rng(listener).expect("entropy"),
            VirtioId::Block => {
                let disk = File::options().read(true).write(true).open(DISK).expect("a disk");
                let (contents, id) = (Contents::from(disk), "disk".to_owned());
                let config = BlockConfig { contents, read_only: false, id, windows: None };
                devices.add_block(listener, config).expect("a disk")
            }
            _ => devices.add_vsock(listener, VsockConfig::default()).expect("vsock").1,
        });
    }
    let stop = devices.stop_handle();
    let served = thread::spawn(move || devices.run());
    match waitpid(child, None) {
        Ok(WaitStatus::Exited(_, code)) => println!("host: the guest ended with {code}"),
        how => println!("host: {how:?}"),
    }
    stop.stop();
    let _ = served.join();
    let mut written = [0; 16];
    let disk = File::open(DISK).expect("a disk");
    disk.read_exact_at(&mut written, WRITTEN_AT).expect("a disk");
    if written == *WRITTEN {
        println!("host: the disk has what was written");
    }
    let mut wrong = Vec::new();
    for device in counted {
        device.each(&mut |what, count| {
            if count > 0 && (what.contains("fault") || what.contains("malformed")) {
                wrong.push(format!("{what} {count}"));
            }
        });
    }
    match wrong.is_empty() {
        true => println!("host: nothing was malformed"),
        false => println!("host: {}", wrong.join(", ")),
    }
}

/// All that the kernel has said until now.
fn kernel_log() -> String {
    let mut said = String::new();
    let mut log = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg");
    let mut record = [0; 8192];
    while let Ok(log) = &mut log {
        // There is a record for each read, until there is none.
        match log.read(&mut record) {
            Ok(length) if length > 0 => said.push_str(&String::from_utf8_lossy(&record[..length])),
            _ => break,
        }
    }
    assert!(!said.is_empty(), "the kernel's log");
    said
}

/// Tries each device.
fn guest() {
    let patiently = |path: &str| loop {
        match File::options().read(true).write(true).open(path) {
            Ok(file) => break file,
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    };
    let mut console = patiently("/dev/hvc0");
    let mut say = |text: String| console.write_all(format!("guest: {text}\n").as_bytes());
    let disk = patiently("/dev/vda");
    let mut read = [0; 16];
    disk.read_exact_at(&mut read, 0).expect("read the disk");
    if read == *READ {
        say("disk reads as it is".to_owned()).expect("a console");
    }
    disk.write_all_at(WRITTEN, WRITTEN_AT).expect("write to the disk");
    disk.sync_all().expect("flush the disk");
    let mut entropy = [0; 8];
    File::open("/dev/hwrng").and_then(|mut file| file.read_exact(&mut entropy)).expect("entropy");
    say(format!("entropy {entropy:?}")).expect("a console");
    let system = |path: &str| {
        let text = fs::read_to_string(format!("/sys/devices/system/{path}")).unwrap_or_default();
        text.trim().to_owned()
    };
    say(format!("processors {}", system("cpu/online"))).expect("a console");
    let clock = system("clocksource/clocksource0/current_clocksource");
    say(format!("clock {clock}")).expect("a console");
    // Its kernel says so of each place where one is a fault that nobody expects.
    let missed = kernel_log().matches("unchecked MSR access").count();
    say(format!("registers that its kernel missed: {missed}")).expect("a console");
}
