//! Containers of other cells in this one's guest: what its supervisor does for theirs.
//!
//! ```text
//! their supervisor ── Contain, the image ──> a window behind the image's disk ──> agent: Contain
//!        │ ────────── Connect ─────────────> a stream within the container
//!        └ hangs up, or ends ──────────────> agent: Discard
//! ```
//! One thread waits for each of them, as for any client. Where the cell has a depot, no image comes
//! and there is no window; who asks is the operator of that ([`crate::inside`]).

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use exocell_agent::{AGENT_PORT, FrameReader, FrameWriter, Kind, client};
use exocell_images::Rootfs;
use exocell_vmm::devices::{VsockHandle, Window, Windows};

use super::clients::{Services, awake};
use super::guest::connect;
use crate::control::{Contain, ControlReply, ControlRequest};
use crate::descriptors::{receive_descriptor, send_descriptor};
use crate::plan::device;
use crate::{CellSpec, Record};

/// How long the guest may take to make room for a container, and to end it: more than its init
/// takes to give up on programs that do not end.
const ANSWER_MAX: Duration = Duration::from_secs(8);
/// The longest name of a host (sethostname(2)).
const HOSTNAME_BYTES_MAX: usize = 64;

/// A container in this guest, until this is dropped.
pub(crate) struct Contained {
    number: u32,
    agent: VsockHandle,
    _window: Option<Window>,
}

impl Contained {
    /// Has the guest make room for `wanted`.
    pub fn begin(
        agent: &VsockHandle,
        windows: &Windows,
        wanted: Contain,
        image: Vec<OwnedFd>,
    ) -> Result<Self, String> {
        let image: Vec<_> = image.into_iter().map(File::from).collect();
        if !image.iter().all(|file| file.metadata().is_ok_and(|found| found.is_file())) {
            return Err("the container's image is no file".to_owned());
        }
        check_names(&wanted)?;
        let image = Rootfs::of(image).map_err(|error| error.to_string())?;
        let contents = device::contents(image).map_err(|error| error.to_string())?;
        let window = windows.open(contents).map_err(|error| error.to_string())?;
        let number = window.offset_bytes / Windows::WINDOW_BYTES;
        let number = u32::try_from(number).map_err(|_| "there were too many containers")?;
        let (offset_bytes, length_bytes) = (window.offset_bytes, window.length_bytes);
        let told = exocell_agent::Contain { offset_bytes, length_bytes, ..told(number, wanted) };
        Self { number, agent: agent.clone(), _window: Some(window) }.make(&told)
    }

    /// Has the guest make room for `wanted`, the `number`th, whose root is in the depot.
    pub fn begin_in_depot(
        agent: &VsockHandle,
        number: u32,
        wanted: Contain,
    ) -> Result<Self, String> {
        check_names(&wanted)?;
        Self { number, agent: agent.clone(), _window: None }.make(&told(number, wanted))
    }

    /// From here on the guest may have it, whatever it says.
    fn make(self, told: &exocell_agent::Contain) -> Result<Self, String> {
        let stream = connect(&self.agent, ANSWER_MAX).map_err(|error| error.to_string())?;
        client::contain(&stream, &stream, told).map_err(|error| error.to_string())?;
        Ok(self)
    }

    /// A stream to the agent, for one request within the container.
    fn connect(&self) -> Result<UnixStream, String> {
        let stream = self.agent.connect(AGENT_PORT).map_err(|error| error.to_string())?;
        client::within(&stream, self.number).map_err(|error| error.to_string())?;
        Ok(stream)
    }
}

fn check_names(wanted: &Contain) -> Result<(), String> {
    let names = [&wanted.hostname, &wanted.domain_name];
    match CellSpec::is_id(&wanted.id) && names.iter().all(|name| name.len() <= HOSTNAME_BYTES_MAX) {
        true => Ok(()),
        false => Err("the container is called as none can be".to_owned()),
    }
}

fn told(number: u32, wanted: Contain) -> exocell_agent::Contain {
    exocell_agent::Contain {
        container: number,
        name: wanted.id,
        hostname: wanted.hostname,
        domain_name: wanted.domain_name,
        read_only: wanted.read_only,
        keeps_files: wanted.keeps_files,
        depot: wanted.depot,
        shares_with: wanted.shares_with,
        shares_pids: wanted.shares_pids,
        ..exocell_agent::Contain::default()
    }
}

impl Drop for Contained {
    fn drop(&mut self) {
        // A guest that keeps it keeps what is its own.
        if let Ok(stream) = connect(&self.agent, ANSWER_MAX) {
            let _ = client::discard(&stream, &stream, self.number);
        }
    }
}

/// Has the guest remove what the container of cell `id` has kept.
pub(super) fn forget(agent: &VsockHandle, id: &str) -> Result<(), String> {
    let stream = connect(agent, ANSWER_MAX).map_err(|error| error.to_string())?;
    client::forget(&stream, &stream, id).map_err(|error| error.to_string())
}

/// The lines to supervisors of containers in this guest; clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Lines {
    streams: Arc<Mutex<Vec<Weak<UnixStream>>>>,
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<UnixStream>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Is heard of at the end, as long as it is held.
    fn hold(&self, stream: &UnixStream) -> std::io::Result<Arc<UnixStream>> {
        let held = Arc::new(stream.try_clone()?);
        let mut streams = self.lock();
        streams.retain(|other| other.strong_count() > 0);
        streams.push(Arc::downgrade(&held));
        Ok(held)
    }

    /// The guest is about to end: they hear of that before their programs do.
    pub fn hang_up(&self) {
        for stream in self.lock().drain(..).filter_map(|stream| stream.upgrade()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Serves the supervisor of a container until it hangs up.
pub(super) fn serve(
    record: &Record,
    lines: &Lines,
    services: &dyn Services,
    stream: &UnixStream,
    wanted: Contain,
) -> Result<(), String> {
    let count = if wanted.depot.is_some() { 0 } else { wanted.files };
    if count > Rootfs::FILES_MAX {
        return Err("the container's image has too many files".to_owned());
    }
    let image = (0..count).map(|_| receive_descriptor(stream)).collect::<Result<Vec<_>, _>>();
    let image = image.map_err(|error| format!("no image came: {error}"))?;
    let contained = awake(record).and_then(|()| services.contain(wanted, image))?;
    let endless = stream.set_read_timeout(None);
    endless.map_err(|error| format!("cannot wait for its end: {error}"))?;
    let _held =
        lines.hold(stream).map_err(|error| format!("cannot tell it of its end: {error}"))?;
    let mut replies = FrameWriter::new(stream);
    if replies.write_json(Kind::Reply, &ControlReply::Done).is_err() {
        return Ok(());
    }
    let mut requests = FrameReader::of_operator(stream);
    while let Ok(request) = requests.expect::<ControlRequest>(Kind::Request) {
        let guest = match request {
            ControlRequest::Connect => awake(record).and_then(|()| contained.connect()),
            _ => Err("a container of this cell is asked by itself".to_owned()),
        };
        let reply = match &guest {
            Ok(_) => ControlReply::Stream,
            Err(message) => ControlReply::Failed { message: message.clone() },
        };
        let passed = replies.write_json(Kind::Reply, &reply);
        let passed =
            passed.is_ok() && guest.map_or(true, |guest| send_descriptor(stream, &guest).is_ok());
        if !passed {
            break;
        }
    }
    drop(contained);
    Ok(())
}
