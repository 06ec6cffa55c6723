//! `Exec`: a program in a session of its own, over a stream.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use exocell_agent::{
    Exec, FailureKind, FrameReader, FrameWriter, ISOLATES_BIN, ISOLATES_TABLE, Kind, Reply, TtySize,
};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::unistd::pipe2;

use crate::error::{Context, InitError};
use crate::io_loop::{Input, Source, pump_output};
use crate::programs::Programs;
use crate::reaper::{Exit, Reaper};
use crate::session::{Agent, STACK_BYTES};
use crate::spawn::{self, Program, Starting, Stdio, Step};
use crate::sys;
use crate::users::{self, Identity};

/// Where programs are looked for when the environment has no PATH: docker's.
const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How long the end of all programs may take that has begun.
const END_MAX: Duration = Duration::from_secs(1);
/// User databases longer than this are read this far, in bytes.
const DATABASE_BYTES_MAX: u64 = 4 << 20;

/// Our ends of the program's streams.
struct Ends {
    sink: Option<File>,
    tty: Option<File>,
    sources: Vec<Source>,
}

/// Runs the program of `request` to its end, its streams over `stream`.
pub fn run(
    agent: &Agent,
    stream: &File,
    frames: FrameReader<&File>,
    request: &Exec,
) -> Result<(), InitError> {
    agent.programs().map_or(Ok(()), Programs::await_proc)?;
    let identity = identify(&request.user)?;
    let program = resolve(request, &identity)?;
    let (stdio, ends) = open_streams(request, identity.uid)?;
    let mut writer = FrameWriter::new(stream);
    let (pid, exit, starting) = start(agent, &program, stdio)?;
    let shown = starting.wait().map_err(|(step, errno)| explain(request, step, errno))?;
    agent.reaper.show(pid, shown);
    writer.write_json(Kind::Reply, &Reply::Started { guest_pid: shown.unsigned_abs() })?;
    // From here on it only passes on what programs and the host say.
    sys::set_nice(0);
    let input = Input::new(frames, ends.sink, ends.tty, &agent.reaper, pid);
    let code = attend(input, ends.sources, &exit, &mut writer)?;
    Ok(writer.write_json(Kind::Reply, &ended(agent, code))?)
}

/// How a program ended: with all others, where the cell's root ended them.
fn ended(agent: &Agent, code: u8) -> Reply {
    let ending = agent.programs().is_some_and(Programs::are_ending);
    match ending.then(|| agent.reaper.end_of_all(END_MAX)).flatten() {
        Some(message) => Reply::Failed { kind: FailureKind::Guest, message },
        None => Reply::Exited { code },
    }
}

/// Forks the child; our copies of its streams are closed on return.
fn start(
    agent: &Agent,
    program: &Program,
    stdio: Stdio,
) -> Result<(i32, Arc<Exit>, Starting), InitError> {
    let mut starting = None;
    let fork = || {
        let (pid, child) = spawn::start(program, &stdio, agent.group(), agent.programs())?;
        starting = Some(child);
        Ok::<i32, Errno>(pid)
    };
    let spawned = Reaper::spawn(&agent.reaper, fork);
    let (pid, exit) = match (spawned, agent.reaper.end_of_all(Duration::ZERO)) {
        (Err(_), Some(why)) => return Err(InitError::guest(why)),
        (spawned, _) => spawned.context(|| "starting the program")?,
    };
    let starting = starting.ok_or_else(|| InitError::guest("the program was not started"))?;
    Ok((pid, exit, starting))
}

/// Runs both loops until the program is dead; its exit code.
fn attend(
    input: Input<'_>,
    sources: Vec<Source>,
    exit: &Exit,
    writer: &mut FrameWriter<&File>,
) -> Result<u8, InitError> {
    let done = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).context(|| "a session")?;
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("input".into()).stack_size(STACK_BYTES);
        let reading = builder.spawn_scoped(scope, || input.run(&done));
        let code = pump_output(sources, exit, writer);
        let _ = done.write(1);
        reading.map(|_| code).context(|| "a thread for the session's input")
    })
}

fn identify(user: &str) -> Result<Identity, InitError> {
    users::resolve(user, &database("/etc/passwd"), &database("/etc/group"))
}

/// A user database; a missing one is empty, and so is one that is no file: a pipe
/// would be waited for.
fn database(path: &str) -> String {
    let mut bytes = Vec::new();
    let opened =
        File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    if let Ok(file) = opened
        && file.metadata().is_ok_and(|metadata| metadata.is_file())
    {
        let _ = io::Read::read_to_end(&mut io::Read::take(file, DATABASE_BYTES_MAX), &mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn resolve(request: &Exec, identity: &Identity) -> Result<Program, InitError> {
    let cwd = make_cwd(&request.cwd)?;
    let mut env = request.env.clone();
    if !env.iter().any(|variable| variable.starts_with("HOME=")) {
        env.push(format!("HOME={}", identity.home));
    }
    if Path::new(ISOLATES_TABLE).exists() {
        add_to_path(&mut env, ISOLATES_BIN);
    }
    let search = env.iter().rev().find_map(|variable| variable.strip_prefix("PATH="));
    let name = request.args.first().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| InitError::invalid("no program to run; give its name"))?;
    let path = find_program(name, search.unwrap_or(PATH_DEFAULT), &cwd)?;
    Ok(Program {
        path: c_string(path.as_os_str().as_bytes())?,
        args: request.args.iter().map(c_string).collect::<Result<_, _>>()?,
        env: env.iter().map(c_string).collect::<Result<_, _>>()?,
        cwd: c_string(cwd.as_os_str().as_bytes())?,
        uid: identity.uid,
        gid: identity.gid,
        groups: identity.groups.clone(),
    })
}

/// Makes `directory` the last in which programs are looked for.
fn add_to_path(env: &mut Vec<String>, directory: &str) {
    let search = env.iter_mut().rev().find(|variable| variable.starts_with("PATH="));
    match search {
        Some(search) => *search = format!("{search}:{directory}"),
        None => env.push(format!("PATH={PATH_DEFAULT}:{directory}")),
    }
}

fn c_string(text: impl AsRef<[u8]>) -> Result<CString, InitError> {
    CString::new(text.as_ref()).map_err(|_| {
        InitError::invalid("an argument, variable or path holds a NUL byte; remove it")
    })
}

/// The working directory, made if it is missing, as docker does.
fn make_cwd(cwd: &str) -> Result<PathBuf, InitError> {
    let cwd = Path::new(if cwd.is_empty() { "/" } else { cwd });
    if !cwd.is_absolute() {
        let message = format!("working directory {}: give an absolute path", cwd.display());
        return Err(InitError::invalid(message));
    }
    if !cwd.is_dir() {
        fs::create_dir_all(cwd)
            .context(|| format!("making the working directory {}", cwd.display()))?;
    }
    Ok(cwd.into())
}

/// Finds `name` in `search`, unless it holds a `/` and so is a path.
fn find_program(name: &str, search: &str, cwd: &Path) -> Result<PathBuf, InitError> {
    if name.contains('/') {
        let path = cwd.join(name);
        check_executable(&path)?;
        return Ok(path);
    }
    let candidates = search.split(':').map(|directory| cwd.join(directory).join(name));
    let mut found = candidates.filter(|path| check_executable(path).is_ok());
    found.next().ok_or_else(|| InitError::not_found(format!("{name}: not found in PATH {search}")))
}

fn check_executable(path: &Path) -> Result<(), InitError> {
    let shown = path.display();
    let metadata =
        fs::metadata(path).map_err(|error| InitError::not_found(format!("{shown}: {error}")))?;
    if metadata.is_dir() {
        return Err(InitError::not_executable(format!("{shown}: is a directory")));
    }
    if metadata.permissions().mode() & 0o111 == 0 {
        let message = format!("{shown}: permission denied: no execute permission");
        return Err(InitError::not_executable(message));
    }
    Ok(())
}

/// Why the child did not become its program.
fn explain(request: &Exec, step: Step, errno: Errno) -> InitError {
    let name = request.args.first().map(String::as_str).unwrap_or_default();
    let error = io::Error::from(errno);
    let message = format!("{name}: {error}");
    match (step, errno) {
        (Step::Exec, Errno::ENOENT | Errno::ENOTDIR) => InitError::not_found(format!(
            "{message}: the program or the interpreter or loader it names does not exist"
        )),
        (Step::Exec, Errno::E2BIG | Errno::ENOMEM | Errno::EAGAIN | Errno::EIO) => {
            InitError::guest(message)
        }
        (Step::Exec, _) => InitError::not_executable(message),
        (Step::Cwd, _) => InitError::io(format!("working directory {}", request.cwd), &error),
        (step, _) => InitError::guest(format!("{message} (while setting up: {step:?})")),
    }
}

fn open_streams(request: &Exec, uid: u32) -> Result<(Stdio, Ends), InitError> {
    let opened = match request.tty {
        Some(size) => open_tty(size, request.stdin),
        None => open_pipes(request.stdin),
    };
    let (stdio, ends) = opened.context(|| "opening the program's standard streams")?;
    // As runc does, so that the program may open /dev/stdout again.
    for stream in &stdio.streams {
        let metadata = fs::File::from(stream.try_clone().context(|| "a stream")?).metadata();
        if metadata.is_ok_and(|m| !is_null_device(&m)) {
            let _ = fchown(stream, Some(uid), None);
        }
    }
    Ok((stdio, ends))
}

/// /dev/null is everyone's and keeps its owner.
fn is_null_device(metadata: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    metadata.rdev() == nix::sys::stat::makedev(1, 3)
}

fn open_tty(size: TtySize, stdin: bool) -> io::Result<(Stdio, Ends)> {
    let (master, terminal) = sys::open_pty(size)?;
    let master = File::from(OwnedFd::from(master));
    set_nonblocking(&master)?;
    let streams = [terminal.try_clone()?, terminal.try_clone()?, terminal];
    let ends = Ends {
        sink: if stdin { Some(master.try_clone()?) } else { None },
        tty: Some(master.try_clone()?),
        sources: vec![Source { file: master, kind: Kind::Stdout }],
    };
    Ok((Stdio { streams, is_tty: true }, ends))
}

fn open_pipes(stdin: bool) -> io::Result<(Stdio, Ends)> {
    let (input, sink) = open_input(stdin)?;
    let (out_read, out) = pipe2(OFlag::O_CLOEXEC)?;
    let (err_read, err) = pipe2(OFlag::O_CLOEXEC)?;
    let sources = vec![
        Source { file: out_read.into(), kind: Kind::Stdout },
        Source { file: err_read.into(), kind: Kind::Stderr },
    ];
    Ok((Stdio { streams: [input, out, err], is_tty: false }, Ends { sink, tty: None, sources }))
}

fn open_input(stdin: bool) -> io::Result<(OwnedFd, Option<File>)> {
    if !stdin {
        return Ok((File::open("/dev/null")?.into(), None));
    }
    let (input, sink) = pipe2(OFlag::O_CLOEXEC)?;
    let sink = File::from(sink);
    set_nonblocking(&sink)?;
    Ok((input, Some(sink)))
}

fn set_nonblocking(file: &File) -> io::Result<()> {
    fcntl(file, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_becomes_the_last_of_the_path_that_counts() {
        let mut env = vec!["PATH=/a".to_owned(), "X=1".to_owned(), "PATH=/b:/c".to_owned()];
        add_to_path(&mut env, "/d");
        assert_eq!(env, ["PATH=/a", "X=1", "PATH=/b:/c:/d"]);
        let mut env = Vec::new();
        add_to_path(&mut env, "/d");
        assert_eq!(env, [format!("PATH={PATH_DEFAULT}:/d")]);
    }
}
