//! The streams of a program, as containerd names them: pipes, files, or a program that logs.
//!
//! | name | is |
//! | --- | --- |
//! | empty | nothing: output is dropped, input is empty |
//! | `/path`, `fifo:///path` | a FIFO that a client of containerd's made |
//! | `file:///path` | a file, written to its end |
//! | `binary:///path?name=value` | a program that reads both outputs (containerd's "binary logging") |

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, posix_spawn};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::unistd::pipe2;

use crate::error::{Result, ShimError};
use crate::refusal::refused;

/// How often it is looked whether output that nobody takes is given up.
const LOOK_MS: u16 = 200;
/// How long a program that logs may take to say that it listens.
const LOGGER_MAX: Duration = Duration::from_secs(10);
/// Bytes read of an input at once.
const CHUNK_BYTES: usize = 32 << 10;

/// The names of a program's streams.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stdio {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

/// Where output goes.
#[derive(Default)]
pub struct Outputs {
    stdout: Option<File>,
    stderr: Option<File>,
}

/// What a name stands for.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    Nothing,
    Fifo(PathBuf),
    File(PathBuf),
    Logger(PathBuf, Vec<(String, String)>),
}

impl Target {
    fn read(name: &str) -> Result<Self> {
        let Some((scheme, rest)) = name.split_once("://") else {
            return match name {
                "" => Ok(Self::Nothing),
                path if path.starts_with('/') => Ok(Self::Fifo(path.into())),
                _ => Err(ShimError::invalid(format!("the stream {name:?} is no absolute path"))),
            };
        };
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        if !path.starts_with('/') {
            return Err(ShimError::invalid(format!("the stream {name:?} is no absolute path")));
        }
        match scheme {
            "fifo" => Ok(Self::Fifo(path.into())),
            "file" => Ok(Self::File(path.into())),
            "binary" => {
                let pair = |text: &str| {
                    let (name, value) = text.split_once('=').unwrap_or((text, ""));
                    (unescaped(name), unescaped(value))
                };
                let pairs = query.split('&').filter(|text| !text.is_empty()).map(pair).collect();
                Ok(Self::Logger(path.into(), pairs))
            }
            _ => Err(refused(format_args!("a stream {scheme}://"), "give fifo, file or binary")),
        }
    }
}

/// Text of a URI's query.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut left = text.bytes();
    while let Some(byte) = left.next() {
        let digits: Vec<u8> =
            if byte == b'%' { left.clone().take(2).collect() } else { Vec::new() };
        let code =
            std::str::from_utf8(&digits).ok().and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match (byte, code) {
            (b'%', Some(code)) if digits.len() == 2 => {
                bytes.push(code);
                left.nth(1);
            }
            (b'+', _) => bytes.push(b' '),
            (byte, _) => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Outputs {
    /// Opens them for the container `id` of `namespace`.
    ///
    /// # Errors
    /// A name is none, or cannot be opened.
    pub fn open(names: &Stdio, namespace: &str, id: &str) -> Result<Self> {
        let stdout = Target::read(&names.stdout)?;
        if let Target::Logger(program, pairs) = &stdout {
            return start_logger(program, pairs, namespace, id);
        }
        // A terminal has one output.
        let stderr = if names.terminal { Target::Nothing } else { Target::read(&names.stderr)? };
        Ok(Self { stdout: open_output(&stdout)?, stderr: open_output(&stderr)? })
    }

    /// Writes what the program wrote, unless `given_up` says that nobody waits for it any more.
    pub fn write(&mut self, is_stderr: bool, bytes: &[u8], given_up: &AtomicBool) {
        let own = if is_stderr { &mut self.stderr } else { &mut self.stdout };
        let Some(file) = own else { return };
        if write_patiently(file, bytes, given_up).is_err() {
            // Whoever read it is gone; the program runs on.
            *own = None;
        }
    }
}

fn open_output(target: &Target) -> Result<Option<File>> {
    let failed = |path: &Path| ShimError::host(format!("cannot open {}", path.display()));
    match target {
        Target::Nothing => Ok(None),
        Target::File(path) => {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder).map_err(failed(path))?;
            }
            let mut options = File::options();
            options.append(true).create(true).mode(0o644);
            options.open(path).map(Some).map_err(failed(path))
        }
        Target::Fifo(path) => {
            // With both ends, so that it is open though nobody reads it (yet, or while containerd
            // starts anew), and closed for readers when this is.
            let is_fifo = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
            let mut options = File::options();
            options.read(is_fifo).write(true).custom_flags(OFlag::O_NONBLOCK.bits());
            options.open(path).map(Some).map_err(failed(path))
        }
        Target::Logger(path, _) => Err(ShimError::invalid(format!(
            "the program {} logs both outputs or none; name it for standard output",
            path.display()
        ))),
    }
}

fn write_patiently(
    file: &mut File,
    mut bytes: &[u8],
    given_up: &AtomicBool,
) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if given_up.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let mut room = [PollFd::new(file.as_fd(), PollFlags::POLLOUT)];
                let _ = poll(&mut room, PollTimeout::from(LOOK_MS));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Starts a program that reads standard output as descriptor 3 and standard error as 4, and closes
/// 5 when it listens.
fn start_logger(
    program: &Path,
    pairs: &[(String, String)],
    namespace: &str,
    id: &str,
) -> Result<Outputs> {
    let failed = || format!("cannot start the logger {}", program.display());
    let pipe = || pipe2(OFlag::O_CLOEXEC).map_err(ShimError::host(failed()));
    let ((out_read, out), (err_read, err), (ready, listening)) = (pipe()?, pipe()?, pipe()?);
    let text = |text: &str| std::ffi::CString::new(text).map_err(ShimError::host(failed()));
    let path = text(&program.to_string_lossy())?;
    let mut arguments = vec![path.clone()];
    for (name, value) in pairs {
        arguments.push(text(name)?);
        if !value.is_empty() {
            arguments.push(text(value)?);
        }
    }
    let mut environment = vec![
        text(&format!("CONTAINER_ID={id}"))?,
        text(&format!("CONTAINER_NAMESPACE={namespace}"))?,
    ];
    if let Ok(search) = std::env::var("PATH") {
        environment.push(text(&format!("PATH={search}"))?);
    }
    // Out of the way of the numbers that they get.
    let high = |end: OwnedFd| {
        let moved = nix::fcntl::fcntl(&end, nix::fcntl::FcntlArg::F_DUPFD_CLOEXEC(64));
        moved.map(|number| (end, number)).map_err(ShimError::host(failed()))
    };
    let ends = [high(out_read)?, high(err_read)?, high(listening)?];
    let spawn = || -> nix::Result<()> {
        let mut actions = PosixSpawnFileActions::init()?;
        for ((_, number), wanted) in ends.iter().zip(3..) {
            actions.add_dup2(*number, wanted)?;
        }
        let attributes = PosixSpawnAttr::init()?;
        posix_spawn(path.as_c_str(), &actions, &attributes, &arguments, &environment).map(drop)
    };
    let spawned = spawn();
    for (_, number) in &ends {
        let _ = nix::unistd::close(*number);
    }
    drop(ends);
    spawned.map_err(ShimError::host(failed()))?;
    let mut waited = [PollFd::new(ready.as_fd(), PollFlags::POLLIN)];
    let limit = PollTimeout::try_from(LOGGER_MAX).unwrap_or(PollTimeout::MAX);
    match poll(&mut waited, limit) {
        Ok(1..) => Ok(Outputs { stdout: Some(out.into()), stderr: Some(err.into()) }),
        _ => Err(ShimError::internal(format!(
            "the logger {} does not say within {} s that it listens (it closes descriptor 5)",
            program.display(),
            LOGGER_MAX.as_secs()
        ))),
    }
}

/// A program's standard input: what a client writes into a FIFO.
pub struct Stdin {
    file: File,
    /// Becomes readable when nobody takes input any more.
    over: EventFd,
}

/// Ends the reading of a program's input.
pub struct Over(OwnedFd);

impl Over {
    pub fn say(&self) {
        let _ = nix::unistd::write(&self.0, &1u64.to_ne_bytes());
    }
}

impl Stdin {
    /// Opens it; `None` where there is none.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(name: &str) -> Result<Option<(Self, Over)>> {
        let path = match Target::read(name)? {
            Target::Nothing => return Ok(None),
            Target::Fifo(path) | Target::File(path) => path,
            Target::Logger(..) => return Err(refused("an input of a program", "give a FIFO")),
        };
        let failed = || ShimError::host(format!("cannot open {}", path.display()));
        // Not waited for: a client may never write.
        let mut options = File::options();
        let file = options.read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(&path);
        let file = file.map_err(failed())?;
        let over = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let over = over.map_err(ShimError::host("cannot make an eventfd"))?;
        let handle = over.as_fd().try_clone_to_owned().map_err(failed())?;
        Ok(Some((Self { file, over }, Over(handle))))
    }

    /// Passes on what comes until all writers are gone, or it is over and nothing is left. `take`
    /// says whether it wants more.
    pub fn pump(mut self, mut take: impl FnMut(&[u8]) -> bool) {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let mut waited = [
                PollFd::new(self.file.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.over.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut waited, PollTimeout::NONE) {
                Err(nix::errno::Errno::EINTR) => continue,
                Err(_) => return,
                Ok(_) => {}
            }
            let is_over = waited[1].any().unwrap_or(false);
            match self.file.read(&mut chunk) {
                Ok(0) => return,
                Ok(count) if take(chunk.get(..count).unwrap_or_default()) => {}
                // What was written before its end was told has been taken.
                Err(error) if error.kind() == ErrorKind::WouldBlock && is_over => return,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_pipes_files_or_programs() {
        assert_eq!(Target::read("").unwrap(), Target::Nothing);
        assert_eq!(Target::read("/run/f").unwrap(), Target::Fifo("/run/f".into()));
        assert_eq!(Target::read("file:///l").unwrap(), Target::File("/l".into()));
        let pairs = vec![("a".to_owned(), "b c".to_owned()), ("d".to_owned(), String::new())];
        let logger = Target::Logger("/bin/l".into(), pairs);
        assert_eq!(Target::read("binary:///bin/l?a=b%20c&d").unwrap(), logger);
        for bad in ["f", "npipe:////./pipe/x", "file://f", "binary-v2:///x"] {
            assert!(Target::read(bad).is_err(), "{bad}");
        }
        assert_eq!(unescaped("100%"), "100%");
    }

    #[test]
    fn output_that_nobody_takes_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let names = Stdio { stdout: path.display().to_string(), ..Stdio::default() };
        let mut outputs = Outputs::open(&names, "n", "i").unwrap();
        let given_up = AtomicBool::new(true);
        // More than a pipe holds.
        outputs.write(false, &vec![0; 1 << 20], &given_up);
        assert!(outputs.stdout.is_some());
    }

    #[test]
    fn input_ends_with_its_last_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (stdin, _over) = Stdin::open(path.to_str().unwrap()).unwrap().unwrap();
        let writer = std::thread::spawn(move || {
            File::options().write(true).open(path).unwrap().write_all(b"in").unwrap();
        });
        let mut got = Vec::new();
        stdin.pump(|bytes| {
            got.extend_from_slice(bytes);
            true
        });
        writer.join().unwrap();
        assert_eq!(got, b"in");
    }

    #[test]
    fn a_logger_has_both_outputs_and_says_that_it_listens() {
        let folder = tempfile::tempdir().unwrap();
        let (script, log) = (folder.path().join("logger"), folder.path().join("log"));
        let text = format!(
            "#!/bin/sh\nexec 5>&-\necho $CONTAINER_ID $1 $2 > {0}\ncat <&3 >> {0}\n",
            log.display()
        );
        std::fs::write(&script, text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&script, mode).unwrap();
        let names = Stdio {
            stdout: format!("binary://{}?key=value", script.display()),
            ..Stdio::default()
        };
        let mut outputs = Outputs::open(&names, "n", "i").unwrap();
        outputs.write(false, b"said\n", &AtomicBool::new(false));
        drop(outputs);
        let mut read = String::new();
        while !read.ends_with("said\n") {
            read = std::fs::read_to_string(&log).unwrap_or_default();
        }
        assert_eq!(read, "i key value\nsaid\n");
    }
}
