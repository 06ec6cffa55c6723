//! Where the cell's program lives: namespaces of its own, below this process's.
//!
//! ```text
//! namespaces of the guest kernel         namespaces of the program
//!   1 init: agent, reaper
//!     └─ forks the namespaces' first ────────> 1 the program: takes in orphans
//!   9 helper ── joins, and makes ────────────> 7 one more program (`Exec`)
//! ```
//! Each is a child of init's, and has nothing of it ([`crate::spawn`]).
//! No program, not even one that is privileged, can name init: not stop, trace or kill it, nor read
//! its memory. Mounts, host name, IPC objects and the view of control groups are the program's too.
//! They end with it, and every other program of the cell.
//!
//! A thread of a session enters them and stays: it ends with its session. Init's own /proc lies
//! nowhere in the file system ([`crate::own_proc`]).

use std::ffi::{CString, OsString};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;

use exocell_agent::oci::{
    ANNOTATION_GROUPS, ANNOTATION_INIT, ANNOTATION_USER, NamespaceKind, Process, Spec,
};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::sethostname;

use crate::capabilities::Sets;
use crate::cgroup::Group;
use crate::error::{Context, InitError};
use crate::mounts::{self, Binds, InChild};
use crate::{limits, own_proc, sys};

/// What a thread enters to see and do what the program does.
const ENTERED: [(&str, CloneFlags); 4] = [
    ("mnt", CloneFlags::CLONE_NEWNS),
    ("ipc", CloneFlags::CLONE_NEWIPC),
    ("uts", CloneFlags::CLONE_NEWUTS),
    ("cgroup", CloneFlags::CLONE_NEWCGROUP),
];

/// The most instructions of a filter of system calls (linux/bpf_common.h, BPF_MAXINSNS).
const FILTER_MAX: usize = 4096;

/// What the program's process does by itself, once it is there.
pub struct Inside {
    pub mounts: Vec<InChild>,
}

/// What a program is held to, and who it is where nobody says.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// `None` leaves a process what it has.
    pub capabilities: Option<Sets>,
    /// Whether the sets are for root, and others get what they would by execve(2).
    pub capabilities_by_user: bool,
    pub no_new_privileges: bool,
    /// What decides on their system calls ([`exocell_agent::Start::filter`]).
    pub filter: Vec<u64>,
    pub limits: Vec<limits::Limit>,
    pub umask: u32,
    pub oom_score_adj: Option<i32>,
    /// Whether a first process is its parent.
    pub init: bool,
    pub user: String,
    /// Beside the user's own, names or numbers.
    pub groups: Vec<String>,
    pub cwd: String,
}

impl Rules {
    /// Those of this machine as it is.
    pub fn of_machine() -> Self {
        Self { umask: 0o022, ..Self::default() }
    }

    /// What `spec` says.
    pub fn read(spec: &Spec) -> Result<Self, InitError> {
        Self::of_process(&spec.process, spec)
    }

    /// The same, for programs whose system calls `filter` decides on.
    ///
    /// # Errors
    /// It is longer than a filter may be.
    pub fn with_filter(self, filter: &[u64]) -> Result<Self, InitError> {
        match filter.len() <= FILTER_MAX {
            true => Ok(Self { filter: filter.to_vec(), ..self }),
            false => Err(InitError::invalid(format!(
                "a filter of system calls has {FILTER_MAX} instructions or less"
            ))),
        }
    }

    /// What `process` says, in the container of `spec`.
    pub fn of_process(process: &Process, spec: &Spec) -> Result<Self, InitError> {
        let named = spec.annotations.contains_key(ANNOTATION_USER);
        let mut groups: Vec<String> =
            process.user.additional_gids.iter().map(u32::to_string).collect();
        let more = spec.annotation(ANNOTATION_GROUPS).split(',');
        groups.extend(more.filter(|group| !group.is_empty()).map(str::to_owned));
        Ok(Self {
            capabilities: process.capabilities.as_ref().map(Sets::read).transpose()?,
            capabilities_by_user: named,
            no_new_privileges: process.no_new_privileges,
            filter: Vec::new(),
            limits: process.rlimits.iter().map(limits::read).collect::<Result<_, _>>()?,
            umask: process.user.umask.unwrap_or(0o022),
            oom_score_adj: process.oom_score_adj,
            init: spec.annotation(ANNOTATION_INIT) == "true",
            user: match named {
                true => spec.annotation(ANNOTATION_USER).to_owned(),
                false => format!("{}:{}", process.user.uid, process.user.gid),
            },
            groups,
            cwd: process.cwd.clone(),
        })
    }

    /// The sets of a process of user `uid`.
    pub fn capabilities_of(&self, uid: u32) -> Option<Sets> {
        match self.capabilities {
            Some(sets) if uid != 0 && self.capabilities_by_user => Some(sets.of_ordinary_user()),
            sets => sets,
        }
    }
}

/// The container that runs.
pub struct Container {
    /// Its first process, as init knows it.
    pub first: i32,
    pid: File,
    entered: Vec<(File, CloneFlags)>,
    pub rules: Rules,
}

impl Container {
    /// That of the process `first`, which waits before its program: that may leave namespaces for
    /// others of its own. `None` when it has ended.
    pub fn of(first: i32, rules: Rules) -> Option<Self> {
        let open = |name: &str| own_proc::open(&format!("{first}/ns/{name}")).ok();
        let entered = ENTERED.iter().map(|(name, flag)| Some((open(name)?, *flag)));
        Some(Self { first, pid: open("pid")?, entered: entered.collect::<Option<_>>()?, rules })
    }

    /// Has this thread see what the program sees: files, host name, IPC objects.
    pub fn enter(&self) -> Result<(), InitError> {
        let enter = || -> nix::Result<()> {
            // A mount namespace is entered by one whose root and directory are no other thread's.
            unshare(CloneFlags::CLONE_FS)?;
            self.entered.iter().try_for_each(|(namespace, flag)| setns(namespace.as_fd(), *flag))
        };
        enter().context(|| "entering the program's namespaces")
    }

    /// Has this thread have the IPC and the host name of the program.
    pub fn share(&self) -> Result<(), InitError> {
        let shared = CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
        let mut shared = self.entered.iter().filter(|(_, flag)| shared.contains(*flag));
        shared
            .try_for_each(|(namespace, flag)| setns(namespace.as_fd(), *flag))
            .context(|| "sharing a container's namespaces")
    }

    /// In which a helper makes processes ([`crate::spawn`]).
    pub fn pid_namespace(&self) -> BorrowedFd<'_> {
        self.pid.as_fd()
    }
}

/// Has this thread be in new namespaces, but for the two that only a process of its own can be in.
pub fn enter_new() -> Result<(), InitError> {
    let new = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    unshare(new).context(|| "making namespaces for the program")
}

/// Makes the namespaces that this thread is in what `spec` says, and limits `group`; `image` is what
/// the container's image holds, `binds` what it binds where that is not in its root.
pub fn lay_out(
    spec: &Spec,
    group: &Group,
    image: Option<&File>,
    binds: Option<Binds>,
) -> Result<Inside, InitError> {
    if let Some(name) = spec.hostname.as_deref().filter(|name| !name.is_empty()) {
        sethostname(name).context(|| format!("setting the host name {name}"))?;
    }
    if let Some(name) = spec.domainname.as_deref().filter(|name| !name.is_empty()) {
        sys::set_domain_name(name).context(|| format!("setting the domain name {name}"))?;
    }
    let mounts = mounts::mount_all(spec, image, binds)?;
    for (name, value) in &spec.linux.sysctl {
        set_sysctl(name, value)?;
    }
    let resources = spec.linux.resources.as_ref();
    if let Some(resources) = resources {
        group.limit(resources)?;
    }
    group.admit_devices(resources.map_or(&[], |resources| &resources.devices))?;
    Ok(Inside { mounts })
}

/// Whether `spec` asks for the namespaces that every container has.
pub fn check_namespaces(spec: &Spec) -> Result<(), InitError> {
    use NamespaceKind::{Cgroup, Ipc, Mount, Pid, Uts};
    let named = |kind| spec.linux.namespaces.iter().any(|namespace| namespace.kind == kind);
    match [Pid, Mount, Ipc, Uts, Cgroup].into_iter().all(named) {
        true => Ok(()),
        false => Err(InitError::invalid(
            "a cell's program has namespaces of its own for pid, mount, ipc, uts and cgroup; name all of them",
        )),
    }
}

/// Sets `name`, as sysctl(8) has it.
fn set_sysctl(name: &str, value: &str) -> Result<(), InitError> {
    let path = name.replace('.', "/");
    if path.split('/').any(|part| part.is_empty() || part == "..") {
        return Err(InitError::invalid(format!("{name} is no setting of a kernel")));
    }
    own_proc::try_write(&format!("sys/{path}"), value)
        .map_err(|error| InitError::invalid(format!("setting {name} to {value:?}: {error}")))
}

/// A path or an argument for the kernel.
pub fn c_string(text: impl Into<Vec<u8>>) -> Result<CString, InitError> {
    CString::new(text).map_err(|error| {
        let text = OsString::from_vec(error.into_vec());
        InitError::invalid(format!("{text:?} holds a NUL byte; remove it"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use exocell_agent::oci::{Capabilities, Namespace};

    #[test]
    fn a_user_by_name_has_roots_sets_only_as_root() {
        let mut spec = Spec::default();
        let named = vec!["CAP_CHOWN".to_owned()];
        let capabilities =
            Capabilities { bounding: named.clone(), effective: named, ..Capabilities::default() };
        spec.process.capabilities = Some(capabilities);
        let sets = |spec: &Spec, uid| Rules::read(spec).unwrap().capabilities_of(uid).unwrap();
        assert_eq!((sets(&spec, 0).effective, sets(&spec, 7).effective), (1, 1));
        spec.annotations.insert(ANNOTATION_USER.to_owned(), "ann".to_owned());
        let ann = sets(&spec, 7);
        assert_eq!((sets(&spec, 0).effective, ann.effective, ann.bounding), (1, 0, 1));
    }

    #[test]
    fn what_a_cell_cannot_give_is_refused_by_name() {
        let mut spec = Spec::default();
        assert!(check_namespaces(&spec).unwrap_err().to_string().contains("cgroup"));
        use NamespaceKind::{Cgroup, Ipc, Mount, Network, Pid, Uts};
        let all = [Pid, Mount, Ipc, Uts, Cgroup, Network];
        spec.linux.namespaces = all.into_iter().map(|kind| Namespace { kind }).collect();
        assert!(check_namespaces(&spec).is_ok());
        assert!(set_sysctl("net..x", "1").unwrap_err().to_string().contains("net..x"));
    }
}
