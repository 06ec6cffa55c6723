//! System calls that have no safe wrapper in `nix`.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use exocell_agent::TtySize;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::pty::{PtyMaster, posix_openpt, unlockpt};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, accept4, socket};
use nix::sys::stat::Mode;

pub mod bpf;

/// Waits for any child to die and leaves it unreaped; its process id.
///
/// nix's `waitid` cannot be used: it fails for a child killed by a real-time
/// signal.
pub fn wait_any() -> nix::Result<i32> {
    let flags = libc::WEXITED | libc::WNOWAIT;
    // SAFETY: siginfo_t is plain data, for which zeroes are a valid value; the
    // pointer is to a local for the length of the call. Needed as said above.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        Errno::result(libc::waitid(libc::P_ALL, 0, &mut info, flags))?;
        Ok(info.si_pid())
    }
}

/// Reaps the child `pid` if it is dead; how it ended.
pub fn reap(pid: i32) -> nix::Result<WaitStatus> {
    wait_for(pid, libc::WNOHANG)
}

/// Waits until the child `pid` is dead, and reaps it.
pub fn reap_when_dead(pid: i32) -> nix::Result<()> {
    loop {
        match wait_for(pid, 0) {
            Err(Errno::EINTR) => {}
            waited => return waited.map(drop),
        }
    }
}

fn wait_for(pid: i32, flags: libc::c_int) -> nix::Result<WaitStatus> {
    let mut status = 0;
    // SAFETY: the pointer is to a local for the length of the call. Needed for
    // real-time signals, as above.
    match Errno::result(unsafe { libc::waitpid(pid, &mut status, flags) })? {
        0 => Err(Errno::ECHILD),
        _ => Ok(WaitStatus(status)),
    }
}

/// What wait(2) says of a process that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitStatus(i32);

impl WaitStatus {
    /// The signal that ended it.
    pub fn signal(self) -> Option<u8> {
        libc::WIFSIGNALED(self.0).then(|| (libc::WTERMSIG(self.0) & 0x7f) as u8)
    }

    /// Its exit status, or 128 + the signal.
    pub fn exit_code(self) -> u8 {
        self.signal().map_or(libc::WEXITSTATUS(self.0) as u8, |number| 128 + number)
    }
}

/// Sends signal `number` (real-time ones too) to `pid`.
pub fn kill(pid: i32, number: u8) -> nix::Result<()> {
    // SAFETY: kill takes no pointers. Needed because nix's Signal has no
    // real-time signals.
    Errno::result(unsafe { libc::kill(pid, i32::from(number)) }).map(drop)
}

/// Sets the domain name of NIS (setdomainname(2)).
pub fn set_domain_name(name: &str) -> nix::Result<()> {
    // SAFETY: setdomainname reads `name.len()` bytes of a live string. Needed for lack of a
    // wrapper.
    Errno::result(unsafe { libc::setdomainname(name.as_ptr().cast(), name.len()) }).map(drop)
}

/// Sets the calling thread's niceness (setpriority(2) is per thread in Linux).
pub fn set_nice(nice: i32) {
    // SAFETY: setpriority takes numbers. Needed because nix does not wrap it. A refusal costs
    // time under load only.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
}

/// A new pseudo-terminal of `size`: the master and its terminal.
pub fn open_pty(size: TtySize, terminals: Option<&File>) -> nix::Result<(PtyMaster, OwnedFd)> {
    let how = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let master = match terminals {
        None => posix_openpt(how)?,
        // SAFETY: the descriptor is one of a terminal's master, for the name is devpts's own
        // (kernel: Documentation/filesystems/devpts.rst). Needed because nix opens only /dev/ptmx.
        Some(root) => unsafe {
            PtyMaster::from_owned_fd(openat(root, "ptmx", how, Mode::empty())?)
        },
    };
    unlockpt(&master)?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: TIOCGPTPEER takes flags, not a pointer, and returns a new
    // descriptor that nothing else owns. Needed to open the terminal without a
    // path, which the program's mount namespace could have changed.
    let terminal = unsafe {
        let fd = libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags);
        OwnedFd::from_raw_fd(Errno::result(fd)?)
    };
    set_tty_size(&master, size)?;
    Ok((master, terminal))
}

/// Sets the window size of a terminal, through either end.
pub fn set_tty_size(tty: impl AsFd, size: TtySize) -> nix::Result<()> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    let fd: RawFd = tty.as_fd().as_raw_fd();
    // SAFETY: TIOCSWINSZ reads a winsize, a local that outlives the call.
    // Needed because nix's wrapper macro is as unsafe.
    Errno::result(unsafe { libc::ioctl(fd, libc::TIOCSWINSZ, &size) }).map(drop)
}

/// Makes a write to a closed stream an error instead of this process's death,
/// as the standard library's start-up does.
pub fn ignore_sigpipe() {
    // SAFETY: SIG_IGN is no code of ours. Needed because nix's is as unsafe.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Accepts a stream, closed on exec.
pub fn accept(listener: &OwnedFd) -> nix::Result<OwnedFd> {
    let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: accept4 just returned this descriptor and nothing else owns it.
    // Needed because nix returns it bare.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets and clears attributes of a mount (mount_setattr(2)).
pub fn set_mount(mount: &File, set: u64, cleared: u64) -> io::Result<()> {
    /// `struct mount_attr` (linux/mount.h).
    #[repr(C)]
    struct Attributes {
        set: u64,
        cleared: u64,
        propagation: u64,
        namespace: u64,
    }
    let attributes = Attributes { set, cleared, propagation: 0, namespace: 0 };
    let (call, at) = (libc::SYS_mount_setattr, std::ptr::from_ref(&attributes));
    let (fd, flags, size) = (mount.as_raw_fd(), libc::AT_EMPTY_PATH, size_of::<Attributes>());
    // SAFETY: the call reads a static string and a local of that size. Needed for lack of a
    // wrapper.
    let done = unsafe { libc::syscall(call, fd, c"".as_ptr(), flags, at, size) };
    Ok(Errno::result(done).map(drop)?)
}

/// Brings the loopback interface up (netdevice(7), SIOCSIFFLAGS).
pub fn loopback_up() -> io::Result<()> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: ifreq is plain data, for which zeroes are a valid value; the name
    // is NUL-terminated; the ioctl reads the local for the length of the call.
    // Needed because nix has no interface flags ioctl.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        Errno::result(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request))?;
    }
    Ok(())
}

/// The socket on which interfaces are set up, and the interface's name.
fn interface(name: &str, v6: bool) -> io::Result<(OwnedFd, libc::ifreq)> {
    let family = if v6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let socket = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: ifreq is plain data, for which zeroes are a valid value. Needed
    // because it has no constructor.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero.
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name.iter_mut().take(room).zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok((socket, request))
}

/// An ioctl(2) of netdevice(7) or rtnetlink's elders.
fn change<T>(socket: &OwnedFd, number: libc::c_ulong, argument: &T) -> io::Result<()> {
    // SAFETY: `argument` is the plain structure that `number` reads, and lives
    // for the length of the call. Needed because nix has none of these.
    let done =
        unsafe { libc::ioctl(socket.as_raw_fd(), number as _, std::ptr::from_ref(argument)) };
    Ok(Errno::result(done).map(drop)?)
}

/// Brings `name` up, without neighbours to ask about: only one is at its other
/// end (netdevice(7), SIOCSIFFLAGS).
pub fn interface_up(name: &str) -> io::Result<()> {
    let (socket, mut request) = interface(name, false)?;
    let flags = libc::IFF_UP | libc::IFF_RUNNING | libc::IFF_NOARP;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    change(&socket, libc::SIOCSIFFLAGS, &request)
}

fn sockaddr(address: Ipv4Addr) -> libc::sockaddr {
    let mut bytes = [0; 14];
    for (to, from) in bytes.iter_mut().skip(2).zip(address.octets()) {
        *to = from as libc::c_char;
    }
    libc::sockaddr { sa_family: libc::AF_INET as u16, sa_data: bytes }
}

/// Gives the interface `name` an address whose first `prefix` bits its neighbours share: they are
/// reached by it.
pub fn set_subnet_v4(name: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let (socket, mut request) = interface(name, false)?;
    request.ifr_ifru.ifru_addr = sockaddr(address);
    change(&socket, libc::SIOCSIFADDR, &request)?;
    let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
    request.ifr_ifru.ifru_addr = sockaddr(Ipv4Addr::from_bits(mask));
    change(&socket, libc::SIOCSIFNETMASK, &request)
}

/// Bounds the packets of the interface `name` (netdevice(7), SIOCSIFMTU).
pub fn set_mtu(name: &str, bytes: u16) -> io::Result<()> {
    let (socket, mut request) = interface(name, false)?;
    request.ifr_ifru.ifru_mtu = bytes.into();
    change(&socket, libc::SIOCSIFMTU, &request)
}

/// Takes the interface `name` down; an alias is gone then (netdevice(7)).
pub fn interface_down(name: &str) -> io::Result<()> {
    let (socket, mut request) = interface(name, false)?;
    request.ifr_ifru.ifru_flags = 0;
    change(&socket, libc::SIOCSIFFLAGS, &request)
}

/// Gives `name` an IPv4 address of its own and the default route.
pub fn set_address_v4(name: &str, address: Ipv4Addr) -> io::Result<()> {
    set_subnet_v4(name, address, 32)?;
    let (socket, mut request) = interface(name, false)?;
    // SAFETY: rtentry is plain data, for which zeroes are a valid value. Needed
    // because it has no constructor.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = sockaddr(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = sockaddr(Ipv4Addr::UNSPECIFIED);
    route.rt_flags = libc::RTF_UP;
    route.rt_dev = request.ifr_name.as_mut_ptr();
    change(&socket, libc::SIOCADDRT, &route)
}

/// in6_ifreq (linux/ipv6.h).
#[repr(C)]
struct AddressV6 {
    address: [u8; 16],
    prefix: u32,
    interface: libc::c_int,
}

/// in6_rtmsg (linux/ipv6_route.h).
#[repr(C)]
#[derive(Default)]
struct RouteV6 {
    destination: [u8; 16],
    source: [u8; 16],
    gateway: [u8; 16],
    kind: u32,
    destination_prefix: u16,
    source_prefix: u16,
    metric: u32,
    info: libc::c_ulong,
    flags: u32,
    interface: libc::c_int,
}

/// Gives `name` an IPv6 address of its own and the default route.
pub fn set_address_v6(name: &str, address: Ipv6Addr) -> io::Result<()> {
    let interface_index = nix::net::if_::if_nametoindex(name)? as libc::c_int;
    let (socket, _) = interface(name, true)?;
    let own = AddressV6 { address: address.octets(), prefix: 128, interface: interface_index };
    change(&socket, libc::SIOCSIFADDR, &own)?;
    let flags = u32::from(libc::RTF_UP);
    let route = RouteV6 { metric: 1, flags, interface: interface_index, ..RouteV6::default() };
    change(&socket, libc::SIOCADDRT, &route)
}

/// Makes loop device `number`, if it is not there; `control` is /dev/loop-control (loop(4)).
pub fn add_loop(control: &File, number: u32) -> nix::Result<()> {
    const LOOP_CTL_ADD: libc::c_ulong = 0x4c80;
    // SAFETY: the call takes a number. Needed for lack of a wrapper.
    let added =
        unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_ADD as _, libc::c_ulong::from(number)) };
    match Errno::result(added) {
        Ok(_) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Has the loop device `device` show, read-only, `length` bytes of `disk` from byte `at` on, until
/// nobody has it open any more (loop(4), LOOP_CONFIGURE).
pub fn set_loop(device: &File, disk: &File, at: u64, length: u64) -> nix::Result<()> {
    const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
    const READ_ONLY: u32 = 1;
    const AUTOCLEAR: u32 = 4;
    const DIRECT_IO: u32 = 16;
    /// `struct loop_config` (linux/loop.h).
    #[repr(C)]
    struct Config {
        disk: u32,
        block_bytes: u32,
        unused: [u64; 3],
        offset: u64,
        length: u64,
        number: u32,
        encryption: [u32; 2],
        flags: u32,
        names: [u8; 64 + 64 + 32],
        rest: [u64; 2 + 8],
    }
    let disk = u32::try_from(disk.as_raw_fd()).map_err(|_| Errno::EBADF)?;
    let flags = READ_ONLY | AUTOCLEAR | DIRECT_IO;
    let config = Config {
        disk,
        block_bytes: 0,
        unused: [0; 3],
        offset: at,
        length,
        number: 0,
        encryption: [0; 2],
        flags,
        names: [0; 160],
        rest: [0; 10],
    };
    // SAFETY: the call reads a structure of its layout, a local that outlives it. Needed for lack
    // of a wrapper.
    let set = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) };
    Errno::result(set).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!(WaitStatus(0x0300).exit_code(), 3);
        assert_eq!(WaitStatus(0xff00).exit_code(), 255);
        assert_eq!(WaitStatus(9).exit_code(), 137);
        assert_eq!(WaitStatus(15 | 0x80).exit_code(), 143);
        assert_eq!(WaitStatus(64).exit_code(), 192);
    }
}
