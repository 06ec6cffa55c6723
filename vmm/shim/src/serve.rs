//! The shim process: what it leaves behind of containerd's, and the service on its socket.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, IntoRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

use containerd_shim_protos::ttrpc::{MethodHandler, Server};
use containerd_shim_protos::{Task, shim_sync};
use exocell_cell::logging;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigSet, Signal};
use tracing::info;

use crate::args::Args;
use crate::bundle;
use crate::error::{Result, ShimError};
use crate::events::Events;
use crate::group::Group;
use crate::service::Service;
use crate::shim::Shim;
use crate::start::{READY, TTRPC_ADDRESS};

/// A shim's log: a FIFO in its bundle that containerd reads.
const LOG: &str = "log";
/// The name of the service in the crate, and that of the version before, which is the same.
const TASK_V3: &str = "/containerd.task.v3.Task/";
const TASK_V2: &str = "/containerd.task.v2.Task/";

/// Serves until containerd shuts the shim down. The caller has one thread; whoever started it
/// reads on standard output whether it serves.
pub fn serve(args: &Args) -> Result<()> {
    let begun = begin(args);
    let mut stdout = std::io::stdout();
    let said = match &begun {
        Ok(_) => writeln!(stdout, "{READY}"),
        Err(error) => writeln!(stdout, "{error}"),
    };
    // Nobody waits for more.
    let _ = said.and_then(|()| stdout.flush());
    let null = File::options().read(true).write(true).open("/dev/null");
    let null = null.map_err(ShimError::host("cannot open /dev/null"))?;
    nix::unistd::dup2_stdout(&null).map_err(ShimError::host("cannot leave standard output"))?;
    let (shim, group, _server) = begun?;
    shim.wait_for_shutdown();
    info!("shut down");
    // The first error is nobody's to hear.
    let _ = std::fs::remove_file(group.socket());
    let _ = std::fs::remove_dir(group.depot());
    Ok(())
}

fn begin(args: &Args) -> Result<(Arc<Shim>, Group, Server)> {
    let failed = "cannot take over the listening socket";
    let listener =
        std::io::stdin().as_fd().try_clone_to_owned().map_err(ShimError::host(failed))?;
    leave(args)?;
    let folder = args.bundle()?;
    let group = Group::of(args, &bundle::annotations(&folder)?)?;
    let address = std::env::var(TTRPC_ADDRESS).unwrap_or_default();
    let events = Events::begin(&address, &args.namespace)?;
    let shim = Arc::new(Shim::new(args, group.clone(), events));
    let server = Server::new()
        .add_listener(listener.into_raw_fd())
        .map_err(ShimError::host(failed))?
        .register_service(methods(&shim, TASK_V3))
        .register_service(methods(&shim, TASK_V2));
    let mut server = server;
    server.start().map_err(ShimError::host("cannot serve"))?;
    info!(id = args.id, namespace = args.namespace, "serves");
    Ok((shim, group, server))
}

/// The methods of the task service under the name of one of its versions.
fn methods(
    shim: &Arc<Shim>,
    version: &str,
) -> std::collections::HashMap<String, Box<dyn MethodHandler + Send + Sync>> {
    let service: Arc<dyn Task + Send + Sync> = Arc::new(Service::new(shim.clone()));
    let named = |(name, handler): (String, _)| (name.replace(TASK_V3, version), handler);
    shim_sync::create_task(service).into_iter().map(named).collect()
}

/// Leaves the terminal, the mounts and the signals of containerd's.
fn leave(args: &Args) -> Result<()> {
    let failed = |what: &str| ShimError::host::<nix::errno::Errno>(what.to_owned());
    // Whoever ends containerd's process group does not mean the containers.
    nix::unistd::setsid().map_err(failed("cannot leave the session"))?;
    let mut ignored = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        ignored.add(signal);
    }
    ignored.thread_block().map_err(failed("cannot block signals"))?;
    let null = File::options().read(true).write(true).open("/dev/null");
    let null = null.map_err(ShimError::host("cannot open /dev/null"))?;
    nix::unistd::dup2_stdin(&null).map_err(failed("cannot leave standard input"))?;
    // Not waited for: containerd may be gone, and a log that is full loses lines.
    let flags = nix::libc::O_NONBLOCK;
    if let Ok(log) = File::options().write(true).custom_flags(flags).open(LOG) {
        nix::unistd::dup2_stderr(&log).map_err(failed("cannot open the log"))?;
    }
    let level = if args.debug { "info" } else { "warn" };
    let level = level.parse().map_err(ShimError::host("the log's level"))?;
    logging::begin(logging::Settings { level, ..logging::Settings::default() });
    // What the host mounts is seen here, and what is mounted here by nobody else: it goes with the
    // last process that is in this namespace.
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed("cannot have mounts of its own"))?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)
        .map_err(failed("cannot keep its mounts to itself"))
}
