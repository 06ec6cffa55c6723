//! A command on a terminal of the test's.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

use nix::pty::{Winsize, openpty};
use rustix::termios::{Winsize as Size, tcsetwinsize};

/// A running command and the operator's side of its terminal.
pub struct OnTerminal {
    pub child: Child,
    master: File,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl OnTerminal {
    pub fn start(command: &mut Command, rows: u16, cols: u16) -> Self {
        let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        let pair = openpty(Some(&size), None).expect("a terminal");
        let side = |fd: &OwnedFd| fd.try_clone().expect("a descriptor");
        command.stdin(side(&pair.slave)).stdout(side(&pair.slave)).stderr(side(&pair.slave));
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        // The command must not be the last to hold the descriptors of the slave's side.
        command.stdin(std::process::Stdio::null());
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let master = File::from(pair.master);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (mut from, to) = (master.try_clone().expect("a descriptor"), seen.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // EIO when the last program on the terminal has gone.
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                to.lock().expect("no reader panics").extend_from_slice(&buffer[..count]);
            }
        });
        Self { child, master, seen }
    }

    pub fn type_in(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    /// What the screen has shown so far.
    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().expect("no reader panics")).into_owned()
    }

    #[track_caller]
    pub fn await_text(&self, text: &str) {
        let shown = super::until(super::LIMIT, || self.shown().contains(text));
        assert!(shown, "{text:?} never appeared in: {}", self.shown());
    }

    /// Changes the window, and tells the command as a shell's terminal would.
    pub fn resize(&self, rows: u16, cols: u16) {
        let size = Size { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.master, size).expect("a new size");
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGWINCH).expect("a signal");
    }

    /// Its exit code.
    #[track_caller]
    pub fn finish(&mut self) -> i32 {
        match super::wait(&mut self.child, super::LIMIT) {
            Some(status) => super::code(status),
            None => panic!("it did not end; the terminal shows: {}", self.shown()),
        }
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        // Both fail only for a child that was waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
