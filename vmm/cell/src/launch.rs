//! From a plan to a supervisor: the last steps in the operator's process.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use exocell_vmm::jail::{self, IdentityMap, Spawned};
use exocell_xgate::CapabilitySet;

use crate::record::{Lease, Record};
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
    pub requested: Instant,
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
    Vm(crate::plan::VmPlan),
    Isolate(crate::isolate::IsolatePlan),
}

/// Starts `workload` under a new supervisor. The caller must have one thread.
pub fn launch(
    layout: &Layout,
    spec: CellSpec,
    caps: CapabilitySet,
    workload: Workload,
    requested: Instant,
) -> Result<Launched, CellError> {
    let (record, lease) = Record::create(layout, &spec)?;
    match start(layout, spec, caps, workload, requested, &record, lease) {
        Ok(launched) => Ok(launched),
        Err(error) => {
            record.remove()?;
            Err(error)
        }
    }
}

fn start(
    layout: &Layout,
    spec: CellSpec,
    caps: CapabilitySet,
    workload: Workload,
    requested: Instant,
    record: &Record,
    lease: Lease,
) -> Result<Launched, CellError> {
    let open = |path: &std::path::Path| {
        File::open(path).map_err(CellError::host(format!("cannot open {}", path.display())))
    };
    let record_dir = open(record.directory())?;
    let (session, operator) =
        UnixStream::pair().map_err(CellError::host("cannot make a socket pair"))?;
    let inheritance = Inheritance {
        control: listen(&record_dir)?,
        cells_dir: open(&layout.cells())?,
        record: record.clone(),
        identity: IdentityMap::for_caller(),
        record_dir,
        spec,
        caps,
        lease,
        operator,
        requested,
    };
    let supervisor = jail::spawn(inheritance.identity, |pid| {
        supervisor::main(inheritance, workload, pid)
    })?;
    Ok(Launched { record: record.clone(), supervisor, session })
}

/// Through the directory's descriptor: a socket's path is at most 107 bytes.
fn listen(record_dir: &File) -> Result<UnixListener, CellError> {
    UnixListener::bind(format!("/proc/self/fd/{}/control.sock", record_dir.as_raw_fd()))
        .map_err(CellError::host("cannot make the cell's control socket"))
}
