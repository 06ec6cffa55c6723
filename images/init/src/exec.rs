//! `Start` and `Exec`: a program in a session of its own, over a stream.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use exocell_agent::oci::{ConsoleSize, Spec};
use exocell_agent::{
    Exec, FailureKind, FrameReader, ISOLATES_BIN, ISOLATES_TABLE, Kind, Reply, Start, TtySize,
};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::unistd::pipe2;

use crate::beside::Entered;
use crate::cgroup::Group;
use crate::container::{self, Container, Inside, Rules, c_string};
use crate::error::{Context, InitError};
use crate::followed::{Host, Line};
use crate::io_loop::{Input, Source, pump_output};
use crate::members::Member;
use crate::reaper::Exit;
use crate::session::{Agent, STACK_BYTES};
use crate::spawn::{self, Failure, Held, Helper, Place, Program, Starting, Stdio, Step};
use crate::users::{self, Identity};
use crate::{own_proc, sys};

/// Where programs are looked for when the environment has no PATH: docker's.
const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Our ends of the program's streams.
struct Ends {
    sink: Option<File>,
    tty: Option<File>,
    sources: Vec<Source>,
}

/// Runs the program of a container, as `request` says, to its end, its streams over `stream`.
pub fn start(
    agent: &Agent,
    member: &Member,
    stream: &File,
    frames: FrameReader<&File>,
    request: &Start,
) -> Result<(), InitError> {
    let (cell, spec) = (agent.cell()?, &request.spec);
    let group = member.group().unwrap_or(&cell.group);
    let process = &spec.process;
    let wanted = Exec {
        args: process.args.clone(),
        env: process.env.clone(),
        tty: process.terminal.then(|| tty_size(process.console_size)),
        stdin: request.stdin,
        ..Exec::default()
    };
    let rules = Rules::read(spec)?.with_filter(&request.filter)?;
    container::check_namespaces(spec)?;
    let _running = member.begin()?;
    let shared = member.beside().map(|beside| agent.shared(beside)).transpose()?.flatten();
    // Before the program's own file systems are in this thread's way.
    let (streams, inside) = match member.beside() {
        None => {
            let streams = open_streams(&wanted, Some(&cell.terminals), Some(&cell.null))?;
            container::enter_new()?;
            (streams, container::lay_out(spec, group, cell.image.as_ref(), None)?)
        }
        Some(beside) => {
            let Entered { terminals, image, binds } =
                beside.enter(cell, spec, shared.as_deref())?;
            let streams = open_streams(&wanted, Some(&*terminals), Some(&cell.null))?;
            (streams, container::lay_out(spec, group, image.as_ref(), binds)?)
        }
    };
    let shares_pids = member.beside().is_some_and(|beside| beside.shares_pids());
    let place = match shared.as_deref().filter(|_| shares_pids) {
        Some(other) => Place::Joining(&inside, other),
        None => Place::New(&inside),
    };
    let session = Session { agent, member, place, rules: &rules, group: None };
    let mut begun = session.begin(&wanted, streams)?;
    if !rules.init && matches!(session.place, Place::New(_)) {
        agent.reaper.watch_first(begun.pid);
    }
    let container = begun.container.take();
    let done = session.follow(&wanted, begun, stream, frames, || member.set_container(container));
    if matches!(session.place, Place::Joining(..)) {
        // The kernel ends the programs of a pid namespace with its first; this one is not.
        let _ = group.kill();
    }
    done
}

/// Runs the program of `request` beside the container's own, to its end.
pub fn run(
    agent: &Agent,
    member: &Member,
    stream: &File,
    frames: FrameReader<&File>,
    request: &Exec,
) -> Result<(), InitError> {
    let container = agent.cell().is_ok().then(|| member.container()).transpose()?;
    let terminals = member.beside().map(|beside| beside.terminals()).transpose()?;
    let cell = agent.cell().ok();
    let terminals = terminals.as_deref().or(cell.map(|cell| &cell.terminals));
    let streams = open_streams(request, terminals, cell.map(|cell| &cell.null))?;
    let mut rules = match &container {
        Some(container) => container.rules.clone(),
        None => Rules::of_machine(),
    };
    // As this process sees the groups, not as the program does.
    let first = container.as_ref().map(|container| container.first);
    let group = agent.group_of(member);
    let group = first.zip(group).and_then(|(first, group)| group.procs_beside(first));
    let place = match &container {
        Some(container) => {
            container.enter()?;
            Place::Beside(container)
        }
        None => Place::Here,
    };
    if let Some(process) = &request.rules {
        let filter = std::mem::take(&mut rules.filter);
        rules = Rules { filter, ..Rules::of_process(process, &Spec::default())? };
    }
    rules.init = false;
    if request.privileged {
        rules.capabilities = None;
        rules.no_new_privileges = false;
        rules.filter.clear();
    }
    let session = Session { agent, member, place, rules: &rules, group };
    let begun = session.begin(request, streams)?;
    session.follow(request, begun, stream, frames, || ())
}

/// A terminal has at least one row and column, and at most what fits its own numbers.
fn tty_size(size: Option<ConsoleSize>) -> TtySize {
    let fit = |cells: u64| u16::try_from(cells).unwrap_or(u16::MAX).max(1);
    size.map_or(TtySize { rows: 24, cols: 80 }, |size| TtySize {
        rows: fit(size.height),
        cols: fit(size.width),
    })
}

/// A program that is to run.
struct Session<'a> {
    agent: &'a Agent,
    member: &'a Member,
    place: Place<'a>,
    rules: &'a Rules,
    /// The `cgroup.procs` that its process joins where the programs' own group takes none.
    group: Option<File>,
}

impl Session<'_> {
    /// Makes the program's process, with its ends of `streams`.
    fn begin(&self, request: &Exec, (stdio, ends): (Stdio, Ends)) -> Result<Begun, InitError> {
        let user = if request.user.is_empty() { &self.rules.user } else { &request.user };
        let identity = identify(user, &self.rules.groups)?;
        let cwd = if request.cwd.is_empty() { &self.rules.cwd } else { &request.cwd };
        let cwd = match self.place {
            Place::Beside(_) => find_cwd(cwd)?,
            Place::New(_) | Place::Joining(..) | Place::Here => make_cwd(cwd)?,
        };
        let program = resolve(request, cwd, &identity, self.rules)?;
        give_streams(&stdio, identity.uid)?;
        let oom_kills_before = self.agent.group_of(self.member).map_or(0, Group::oom_kills);
        let made = match self.place {
            Place::Here => self.fork(&program, stdio)?,
            Place::New(inside) if !program.init => self
                .make_first(&program, stdio, inside)
                .map_err(|failure| self.explain(request, failure))?,
            Place::Beside(_) | Place::New(_) | Place::Joining(..) => {
                self.make(&program, stdio).map_err(|failure| self.explain(request, failure))?
            }
        };
        let Made { pid, shown, exit, starting, container } = made;
        Ok(Begun { pid, shown, exit, starting, container, ends, oom_kills_before })
    }

    /// Passes on what the program and the host say, until the program has ended.
    fn follow(
        &self,
        request: &Exec,
        begun: Begun,
        stream: &File,
        frames: FrameReader<&File>,
        on_start: impl FnOnce(),
    ) -> Result<(), InitError> {
        let Begun { pid, shown, exit, starting, ends, oom_kills_before, .. } = begun;
        let Agent { reaper, lines, .. } = self.agent;
        let key = (self.member.number(), shown);
        if let Err(failure) = starting.wait() {
            // It may have said so and run.
            let _ = reaper.signal(pid, libc::SIGKILL as u8);
            return Err(self.explain(request, failure));
        }
        reaper.show(pid, key);
        let line =
            request.lasting.then(|| Line::new(pid, &exit, ends.sink.as_ref(), ends.tty.as_ref()));
        let line = line.transpose().context(|| "the program's line")?;
        if let Some(line) = &line {
            lines.add(key, line);
        }
        on_start();
        let guest_pid = shown.unsigned_abs();
        let mut host = Host::new(stream, line.clone(), guest_pid);
        let told = host.reply(&Reply::Started { guest_pid });
        if line.is_none() {
            told?;
        }
        // From here on it only passes on what programs and the host say.
        sys::set_nice(0);
        let input = Input::new(frames, ends.sink, ends.tty, reaper, pid, line.as_deref());
        let code = attend(input, ends.sources, &exit, &mut host);
        if line.is_some() {
            lines.remove(key);
            host.renew();
        }
        let code = code?;
        let oom_kills = self.agent.group_of(self.member).map_or(0, Group::oom_kills);
        let reply = match exit.by_reboot() {
            Some(message) => Reply::Failed { kind: FailureKind::Guest, message },
            None => Reply::Exited { code, out_of_memory: oom_kills > oom_kills_before },
        };
        Ok(host.reply(&reply)?)
    }

    /// Why its child did not become the program.
    fn explain(&self, request: &Exec, failure: Failure) -> InitError {
        let cwd = if request.cwd.is_empty() { &self.rules.cwd } else { &request.cwd };
        explain(request, cwd, failure)
    }

    /// Our copies of its streams are closed on return.
    fn fork(&self, program: &Program, stdio: Stdio) -> Result<Made, InitError> {
        let mut starting = None;
        let fork = || {
            let (pid, child) = spawn::start_here(program, &stdio)?;
            starting = Some(child);
            Ok::<i32, Errno>(pid)
        };
        let (pid, exit) = self.agent.reaper.spawn(fork).context(|| "starting the program")?;
        let starting = starting.ok_or_else(|| InitError::guest("the program was not started"))?;
        Ok(Made { pid, shown: pid, exit, starting, container: None })
    }

    /// As [`Self::fork`], as the first process of a pid namespace.
    fn make_first(
        &self,
        program: &Program,
        stdio: Stdio,
        inside: &Inside,
    ) -> Result<Made, Failure> {
        let mut held = None;
        let start = || {
            let (pid, process) = spawn::start_first(program, &stdio, inside)?;
            held = Some(process);
            Ok::<i32, Errno>(pid)
        };
        let failed = |errno| Failure::At(Step::Session, errno);
        let (pid, exit) = self.agent.reaper.spawn(start).map_err(failed)?;
        let held = held.ok_or(failed(Errno::ECHILD))?;
        self.settle(pid, own_proc::innermost_pid(pid), exit, held)
    }

    /// As [`Self::fork`], in the pid namespace of programs.
    fn make(&self, program: &Program, stdio: Stdio) -> Result<Made, Failure> {
        let failed = |step| move |errno| Failure::At(step, errno);
        let reaper = &self.agent.reaper;
        let mut started = None;
        let start = || {
            let (pid, helper) = Helper::start(program, &stdio, &self.place)?;
            started = Some(helper);
            Ok::<i32, Errno>(pid)
        };
        let (pid, _) = reaper.spawn(start).map_err(failed(Step::Session))?;
        let mut helper = started.ok_or(Failure::At(Step::Session, Errno::ECHILD))?;
        if let Err(failure) = helper.await_ready() {
            let _ = reaper.signal(pid, libc::SIGKILL as u8);
            return Err(failure);
        }
        let mut shown = None;
        let make = || {
            let made = helper.make(pid)?;
            shown = own_proc::innermost_pid(made);
            Ok(made)
        };
        let (pid, exit) = reaper.replace(pid, make).map_err(failed(Step::Session))?;
        self.settle(pid, shown, exit, helper.held())
    }

    /// Gives a process that waits what only init can give it, and lets it go.
    fn settle(
        &self,
        pid: i32,
        shown: Option<i32>,
        exit: Arc<Exit>,
        mut held: Held,
    ) -> Result<Made, Failure> {
        let settled = || {
            self.join_group(pid)?;
            shown.ok_or(io::ErrorKind::NotFound.into())
        };
        let shown = settled().map_err(|error: io::Error| {
            let _ = self.agent.reaper.signal(pid, libc::SIGKILL as u8);
            Failure::At(Step::Cgroup, Errno::from_raw(error.raw_os_error().unwrap_or(libc::ESRCH)))
        })?;
        if let Some(adjustment) = self.rules.oom_score_adj.filter(|own| *own != 0) {
            own_proc::write(&format!("{pid}/oom_score_adj"), &adjustment.to_string());
        }
        let container = match self.place {
            Place::New(_) | Place::Joining(..) => {
                held.enter_namespaces().inspect_err(|_| {
                    let _ = self.agent.reaper.signal(pid, libc::SIGKILL as u8);
                })?;
                Container::of(pid, self.rules.clone())
            }
            Place::Here | Place::Beside(_) => None,
        };
        Ok(Made { pid, shown, exit, starting: held.let_go(pid), container })
    }

    /// Puts the process into the programs' control group, or the one below that its like are in.
    fn join_group(&self, pid: i32) -> io::Result<()> {
        let Some(group) = self.agent.group_of(self.member) else { return Ok(()) };
        let mut procs = self.group.as_ref().unwrap_or(&group.procs);
        procs.write_all(pid.to_string().as_bytes())
    }
}

/// A process that may not have reached its program yet.
struct Made {
    pid: i32,
    /// The pid by which it knows itself.
    shown: i32,
    exit: Arc<Exit>,
    starting: Starting,
    /// What it is the first process of.
    container: Option<Container>,
}

/// A program whose process there is.
struct Begun {
    pid: i32,
    shown: i32,
    exit: Arc<Exit>,
    starting: Starting,
    container: Option<Container>,
    ends: Ends,
    oom_kills_before: u64,
}

/// Runs both loops until the program is dead; its exit code.
fn attend(
    input: Input<'_>,
    sources: Vec<Source>,
    exit: &Exit,
    host: &mut Host<'_>,
) -> Result<u8, InitError> {
    let done = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).context(|| "a session")?;
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("input".into()).stack_size(STACK_BYTES);
        let reading = builder.spawn_scoped(scope, || input.run(done.as_fd()));
        let code = pump_output(sources, exit, host);
        let _ = done.write(1);
        reading.map(|_| code).context(|| "a thread for the session's input")
    })
}

/// The user, with `groups` beside its own.
fn identify(user: &str, groups: &[String]) -> Result<Identity, InitError> {
    let named = users::database("/etc/group");
    let mut identity = users::resolve(user, &users::database("/etc/passwd"), &named)?;
    for group in groups {
        identity.groups.push(users::resolve_group(group, &named)?);
    }
    Ok(identity)
}

fn resolve(
    request: &Exec,
    cwd: PathBuf,
    identity: &Identity,
    rules: &Rules,
) -> Result<Program, InitError> {
    let mut env = request.env.clone();
    if !env.iter().any(|variable| variable.starts_with("HOME=")) {
        env.push(format!("HOME={}", identity.home));
    }
    if !env.iter().any(|variable| variable.starts_with("HOSTNAME="))
        && let Ok(name) = nix::unistd::gethostname()
    {
        env.push(format!("HOSTNAME={}", name.to_string_lossy()));
    }
    if Path::new(ISOLATES_TABLE).exists() {
        add_to_path(&mut env, ISOLATES_BIN);
    }
    let search = env.iter().rev().find_map(|variable| variable.strip_prefix("PATH="));
    let name = request.args.first().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| InitError::invalid("no program to run; give its name"))?;
    let path = find_program(name, search.unwrap_or(PATH_DEFAULT), &cwd)?;
    let c_strings = |texts: &[String]| {
        texts.iter().map(|text| c_string(text.as_str())).collect::<Result<_, InitError>>()
    };
    Ok(Program {
        path: c_string(path.as_os_str().as_bytes())?,
        args: c_strings(&request.args)?,
        env: c_strings(&env)?,
        cwd: c_string(cwd.as_os_str().as_bytes())?,
        uid: identity.uid,
        gid: identity.gid,
        groups: identity.groups.clone(),
        umask: rules.umask,
        limits: rules.limits.clone(),
        capabilities: rules.capabilities_of(identity.uid),
        no_new_privileges: rules.no_new_privileges,
        filter: rules.filter.clone(),
        init: rules.init,
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

/// The working directory of a container's own program, made if it is missing, as docker does.
fn make_cwd(cwd: &str) -> Result<PathBuf, InitError> {
    let cwd = absolute(cwd)?;
    if !cwd.is_dir() {
        fs::create_dir_all(&cwd)
            .context(|| format!("making the working directory {}", cwd.display()))?;
    }
    Ok(cwd)
}

/// That of one more program, which is there or is an error, as for docker.
fn find_cwd(cwd: &str) -> Result<PathBuf, InitError> {
    let cwd = absolute(cwd)?;
    match cwd.is_dir() {
        true => Ok(cwd),
        false => Err(InitError::not_found(format!(
            "working directory {}: no such directory; make it first, or name another",
            cwd.display()
        ))),
    }
}

/// The root where none is named.
fn absolute(cwd: &str) -> Result<PathBuf, InitError> {
    let cwd = Path::new(if cwd.is_empty() { "/" } else { cwd });
    match cwd.is_absolute() {
        true => Ok(cwd.into()),
        false => {
            let message = format!("working directory {}: give an absolute path", cwd.display());
            Err(InitError::invalid(message))
        }
    }
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
fn explain(request: &Exec, cwd: &str, failure: Failure) -> InitError {
    let name = request.args.first().map(String::as_str).unwrap_or_default();
    let Failure::At(step, errno) = failure else {
        let limit_s = spawn::BEGIN_MAX.as_secs();
        return InitError::guest(format!(
            "{name}: did not start within {limit_s} s: a program of the cell holds its file, by a lease (fcntl(2)), or the file system that it lies on; end that program"
        ));
    };
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
        (Step::Cwd, _) => InitError::io(format!("working directory {cwd}"), &error),
        (Step::Limits, _) => {
            InitError::invalid(format!("setting a limit of it: {error} (--ulimit)"))
        }
        (step, _) => InitError::guest(format!("{message} (while setting up: {step:?})")),
    }
}

/// `terminals` are the container's, and `null` is what was /dev/null before any program ran; without
/// them this machine's.
fn open_streams(
    request: &Exec,
    terminals: Option<&File>,
    null: Option<&File>,
) -> Result<(Stdio, Ends), InitError> {
    let opened = match request.tty {
        Some(size) => open_tty(size, request.stdin, terminals),
        None => open_pipes(request.stdin, null),
    };
    opened.context(|| "opening the program's standard streams")
}

/// As runc does, so that the program may open /dev/stdout again.
fn give_streams(stdio: &Stdio, uid: u32) -> Result<(), InitError> {
    for stream in &stdio.streams {
        let metadata = fs::File::from(stream.try_clone().context(|| "a stream")?).metadata();
        if metadata.is_ok_and(|m| !is_null_device(&m)) {
            let _ = fchown(stream, Some(uid), None);
        }
    }
    Ok(())
}

/// /dev/null is everyone's and keeps its owner.
fn is_null_device(metadata: &fs::Metadata) -> bool {
    metadata.rdev() == nix::sys::stat::makedev(1, 3)
}

fn open_tty(size: TtySize, stdin: bool, terminals: Option<&File>) -> io::Result<(Stdio, Ends)> {
    let (master, terminal) = sys::open_pty(size, terminals)?;
    let master = File::from(OwnedFd::from(master));
    set_nonblocking(&master)?;
    let streams = [terminal.try_clone()?, terminal.try_clone()?, terminal];
    let ends = Ends {
        sink: if stdin { Some(master.try_clone()?) } else { None },
        tty: Some(master.try_clone()?),
        sources: vec![Source { file: master, kind: Kind::Stdout, is_tty: true }],
    };
    Ok((Stdio { streams, is_tty: true }, ends))
}

fn open_pipes(stdin: bool, null: Option<&File>) -> io::Result<(Stdio, Ends)> {
    let (input, sink) = open_input(stdin, null)?;
    let (out_read, out) = pipe2(OFlag::O_CLOEXEC)?;
    let (err_read, err) = pipe2(OFlag::O_CLOEXEC)?;
    let sources = vec![
        Source { file: out_read.into(), kind: Kind::Stdout, is_tty: false },
        Source { file: err_read.into(), kind: Kind::Stderr, is_tty: false },
    ];
    Ok((Stdio { streams: [input, out, err], is_tty: false }, Ends { sink, tty: None, sources }))
}

fn open_input(stdin: bool, null: Option<&File>) -> io::Result<(OwnedFd, Option<File>)> {
    if !stdin {
        let opened = null.map_or_else(|| File::open("/dev/null"), own_proc::open_again);
        return Ok((opened?.into(), None));
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
