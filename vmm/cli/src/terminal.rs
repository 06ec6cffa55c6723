//! The operator's terminal.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use exocell_cell::agent::TtySize;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

/// Puts the terminal into raw mode until dropped.
pub struct Raw(Termios);

impl Raw {
    /// `None` where standard input is no terminal.
    pub fn enter() -> Option<Self> {
        let stdin = std::io::stdin();
        let before = tcgetattr(stdin.as_fd()).ok()?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(stdin.as_fd(), SetArg::TCSANOW, &raw).ok()?;
        Some(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = tcsetattr(std::io::stdin().as_fd(), SetArg::TCSADRAIN, &self.0);
    }
}

/// The terminal's size, where standard output is one.
pub fn size() -> Option<TtySize> {
    let stdout = std::io::stdout();
    if !stdout.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(stdout.as_fd()).ok()?;
    Some(TtySize { rows: size.ws_row, cols: size.ws_col })
}
