//! System calls that have no safe wrapper in `nix`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use exocell_agent::TtySize;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::pty::{PtyMaster, posix_openpt, unlockpt};
use nix::sys::socket::{SockFlag, accept4};

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

/// Reaps the dead child `pid`; its exit status, or 128 + the signal.
pub fn reap(pid: i32) -> nix::Result<u8> {
    let mut status = 0;
    // SAFETY: the pointer is to a local for the length of the call. Needed for
    // real-time signals, as above.
    Errno::result(unsafe { libc::waitpid(pid, &mut status, 0) })?;
    Ok(exit_code(status))
}

fn exit_code(status: i32) -> u8 {
    if libc::WIFSIGNALED(status) {
        return 128 + (libc::WTERMSIG(status) & 0x7f) as u8;
    }
    libc::WEXITSTATUS(status) as u8
}

/// Sends signal `number` (real-time ones too) to `pid`.
pub fn kill(pid: i32, number: u8) -> nix::Result<()> {
    // SAFETY: kill takes no pointers. Needed because nix's Signal has no
    // real-time signals.
    Errno::result(unsafe { libc::kill(pid, i32::from(number)) }).map(drop)
}

/// A new pseudo-terminal of `size`: the master and its terminal.
pub fn open_pty(size: TtySize) -> nix::Result<(PtyMaster, OwnedFd)> {
    let master = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!(exit_code(0x0300), 3);
        assert_eq!(exit_code(0xff00), 255);
        assert_eq!(exit_code(9), 137);
        assert_eq!(exit_code(15 | 0x80), 143);
        assert_eq!(exit_code(64), 192);
    }
}
