//! From a plan to a supervisor: the last steps in the operator's process.

use std::fs::{self, File, Permissions};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use exocell_agent::TtySize;
use exocell_network::Secret;
use exocell_vmm::jail::{self, Group, HostNetwork, IdentityMap, Spawned};
use exocell_xgate::CapabilitySet;

use crate::logging::Steps;
use crate::plan::VmPlan;
use crate::plan::sidecar::SidecarPlan;
use crate::record::{Lease, Record, Status};
use crate::{CellError, CellSpec, Layout, supervisor};

/// What a supervisor is born with. Everything in it was opened by the
/// operator's process; inside the jail no path leads to the host.
pub struct Inheritance {
    pub spec: CellSpec,
    pub caps: CapabilitySet,
    pub record: Record,
    pub lease: Lease,
    /// ROOT/cells, to remove the record's directory from.
    pub cells_dir: File,
    pub record_dir: File,
    pub control: UnixListener,
    /// The operator's own connection, attached from the start.
    pub operator: UnixStream,
    pub identity: IdentityMap,
    /// Of a guest's processes, where the host has that.
    pub group: Option<Arc<Group>>,
    pub requested: Instant,
    /// Descriptors that the supervisor is born with and must not keep.
    pub foreign: Vec<RawFd>,
}

/// A supervisor that was started.
pub struct Launched {
    pub record: Record,
    pub supervisor: Spawned,
    /// Carries the program's session; see [`crate::control`].
    pub session: UnixStream,
}

/// What runs in the cell.
pub enum Workload {
    Vm(Box<VmPlan>),
    Isolate(Box<crate::isolate::IsolatePlan>),
    /// A container in another cell's guest.
    Sidecar(Box<SidecarPlan>),
}

impl Workload {
    fn group(&self, record: &Record) -> Result<Option<Arc<Group>>, CellError> {
        match self {
            Self::Vm(plan) => Group::make(&record.id, plan.limits.bytes_max())
                .map(|group| group.map(Arc::new))
                .map_err(CellError::host("cannot make a memory control group")),
            Self::Isolate(_) | Self::Sidecar(_) => Ok(None),
        }
    }

    /// What `spec`, which is of strength `vm`, is to run: in a guest of its own, or in another
    /// cell's; then spec and grant come to say what it gets there. Every start goes through here, and
    /// so each has the grant of the spec as it holds now ([`CellSpec::granted`]).
    ///
    /// # Errors
    /// As those of the plans.
    pub fn plan(
        layout: &Layout,
        spec: &mut CellSpec,
        tty: Option<TtySize>,
        secrets: Vec<Secret>,
    ) -> Result<(Self, CapabilitySet), CellError> {
        let caps = spec.granted()?;
        // Memory is what the grant says again.
        spec.changes.memory_bytes = None;
        if spec.within.is_none() {
            let plan = VmPlan::new(layout, spec, &caps, tty, secrets)?;
            return Ok((Self::Vm(Box::new(plan)), caps));
        }
        if !secrets.is_empty() {
            return Err(CellError::Usage(
                "--secret: the network is the other cell's, which has the secrets; start that one \
                 with it"
                    .to_owned(),
            ));
        }
        let (plan, caps) = SidecarPlan::new(layout, spec, &caps, tty)?;
        Ok((Self::Sidecar(Box::new(plan)), caps))
    }
}

/// When a request came, and what the process that took it had open.
#[derive(Debug)]
pub struct Request {
    at: Instant,
    foreign: Vec<RawFd>,
}

impl Request {
    /// To be called before anything is opened: what is open now, beyond the
    /// three standard streams, is not for the cell.
    pub fn begin() -> Self {
        let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut foreign: Vec<RawFd> = numbers.filter(|number| *number > 2).collect();
        // The listing's own descriptor is closed again by now.
        foreign
            .retain(|number| std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_ok());
        Self { at: Instant::now(), foreign }
    }

    /// Closes what the process had open.
    pub(crate) fn close_foreign(&self) {
        for descriptor in &self.foreign {
            // What is closed already needs no closing.
            let _ = nix::unistd::close(*descriptor);
        }
    }

    /// When it has to be done, by the deadline of `caps`.
    #[must_use]
    pub fn deadline(&self, caps: &CapabilitySet) -> Option<Instant> {
        caps.deadline().and_then(|limit| self.at.checked_add(limit))
    }
}

/// Starts `workload` under a new supervisor. The caller must have one thread.
pub fn launch(
    layout: &Layout,
    spec: CellSpec,
    caps: CapabilitySet,
    workload: Workload,
    mut request: Request,
) -> Result<Launched, CellError> {
    let (session, operator) =
        UnixStream::pair().map_err(CellError::host("cannot make a socket pair"))?;
    // The supervisor is born with a copy of the operator's end too. It must not
    // keep it: it would never see that the operator is gone.
    request.foreign.push(session.as_raw_fd());
    let (record, supervisor) = launch_for(layout, spec, caps, workload, request, operator)?;
    Ok(Launched { record, supervisor, session })
}

/// As [`launch`], for an operator in another process: `operator` is the
/// supervisor's end of the program's session. The caller must have one thread.
pub fn launch_for(
    layout: &Layout,
    spec: CellSpec,
    caps: CapabilitySet,
    mut workload: Workload,
    request: Request,
    operator: UnixStream,
) -> Result<(Record, Spawned), CellError> {
    let mut steps = Steps::begin();
    if let Workload::Vm(plan) = &mut workload {
        plan.start_folders(&spec.id)?;
        steps.done("folders served");
    }
    let again = Record::exists(layout, &spec.id);
    let (record, lease) = Record::create(layout, &spec)?;
    let start = || -> Result<Spawned, CellError> {
        if let Workload::Vm(plan) = &workload
            && spec.keeps_disk
        {
            plan.keep_disk(&record)?;
        }
        let record_dir = open(record.directory())?;
        let inheritance = Inheritance {
            control: listen(&record_dir)?,
            cells_dir: open(&layout.cells())?,
            record: record.with_open_events()?,
            identity: IdentityMap::for_caller(),
            group: workload.group(&record)?,
            record_dir,
            spec,
            caps,
            lease,
            operator,
            requested: request.at,
            foreign: request.foreign,
        };
        let network = match &workload {
            Workload::Vm(plan) if plan.network.is_some() => HostNetwork::AtFirst,
            Workload::Isolate(plan) if plan.network.is_some() => HostNetwork::AtFirst,
            Workload::Vm(_) | Workload::Isolate(_) | Workload::Sidecar(_) => HostNetwork::Never,
        };
        let identity = inheritance.identity;
        Ok(jail::spawn(identity, network, |pid| supervisor::main(inheritance, workload, pid))?)
    };
    match start() {
        Ok(supervisor) => {
            steps.done("supervisor started");
            Ok((record, supervisor))
        }
        Err(error) => {
            jail::group::remove(&record.id);
            match again {
                // It is still the record of what ended before.
                true => record.write_status(&Status::failed(&error))?,
                false => record.remove()?,
            }
            Err(error)
        }
    }
}

fn open(path: &Path) -> Result<File, CellError> {
    File::open(path).map_err(CellError::host(format!("cannot open {}", path.display())))
}

/// Through the directory's descriptor: a socket's path is at most 107 bytes.
fn listen(record_dir: &File) -> Result<UnixListener, CellError> {
    let path = format!("/proc/self/fd/{}/control.sock", record_dir.as_raw_fd());
    UnixListener::bind(&path)
        .and_then(|listener| {
            fs::set_permissions(&path, Permissions::from_mode(0o600)).map(|()| listener)
        })
        .map_err(CellError::host("cannot make the cell's control socket"))
}
