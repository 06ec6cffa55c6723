//! Messages to the guest kernel's log.

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::OnceLock;

static KMSG: OnceLock<File> = OnceLock::new();

/// Opens the kernel's log, before the root changes; without it, messages go to
/// standard error.
pub fn open() {
    if let Ok(file) = OpenOptions::new().write(true).open("/dev/kmsg") {
        let _ = KMSG.set(file);
    }
}

/// Logs one line at level 4 (warning), which reaches the console.
pub fn warn(message: impl Display) {
    let line = format!("<4>exocell-init: {message}\n");
    match KMSG.get() {
        Some(mut kmsg) => drop(kmsg.write_all(line.as_bytes())),
        None => eprint!("{}", &line[3..]),
    }
}
