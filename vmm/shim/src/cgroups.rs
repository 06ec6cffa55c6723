//! The host's control groups that a cell's processes are in: those that the specification of its
//! first container names (`linux.cgroupsPath`), so that whoever counts or limits a pod by its group
//! (kubelet, cAdvisor) counts and limits the cell.
//!
//! ```text
//! /kubepods/podU/ID             as it is, in every hierarchy that the host has
//! kubepods-podU.slice:cri:ID    systemd's: kubepods.slice/kubepods-podU.slice/cri-ID.scope
//! ```
//! The launcher goes there before it makes the supervisor, whose processes are born there
//! ([`crate::launch`]). Directories are made with mkdir(2); systemd is not told of them. The groups
//! of a pod's other containers are not made: what those use is the guest's to say.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Result, ShimError};
use crate::refusal::refused;

/// How long the last processes of a group may take to end.
const EMPTY_MAX: Duration = Duration::from_secs(2);
/// Controllers that a group of version 2 passes on to those below.
const CONTROLLERS: [&str; 5] = ["cpu", "memory", "pids", "io", "cpuset"];
/// Bytes that a cell's processes outside of its guest have: its supervisor, and whoever serves its
/// files.
const BESIDE_BYTES: u64 = 128 << 20;

/// The groups of a cell, one in each hierarchy.
#[derive(Debug)]
pub struct Home {
    folders: Vec<PathBuf>,
}

impl Home {
    /// Makes those that `named` (`linux.cgroupsPath`) stands for; `None` where it is empty, or the
    /// host has no hierarchy.
    ///
    /// # Errors
    /// It names none, or the host does not make it.
    pub fn make(named: &str) -> Result<Option<Self>> {
        let home = Self::of(named)?;
        for folder in home.iter().flat_map(|home| &home.folders) {
            made(folder).map_err(ShimError::host(format!(
                "cannot make the control group {} (linux.cgroupsPath)",
                folder.display()
            )))?;
        }
        Ok(home)
    }

    /// The same, without making them.
    ///
    /// # Errors
    /// It names none.
    pub fn of(named: &str) -> Result<Option<Self>> {
        if named.is_empty() {
            return Ok(None);
        }
        let path = path(named)?;
        let text = fs::read_to_string("/proc/self/mountinfo");
        let text = text.map_err(ShimError::host("cannot read /proc/self/mountinfo"))?;
        let folders: Vec<PathBuf> = mounted(&text).into_iter().map(|at| at.join(&path)).collect();
        Ok((!folders.is_empty()).then_some(Self { folders }))
    }

    pub fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// Takes them away once their processes are dead, which they must be about to be.
    pub fn remove(&self) {
        let until = Instant::now() + EMPTY_MAX;
        for folder in &self.folders {
            let busy = |error: std::io::Error| error.kind() == ErrorKind::ResourceBusy;
            while fs::remove_dir(folder).is_err_and(busy) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

/// Moves the calling process into `folders`, whose processes have no more memory than `bytes` for a
/// guest and something for those who serve it.
///
/// # Errors
/// The host's.
pub fn enter(folders: &[PathBuf], bytes: u64) -> Result<()> {
    let most = bytes.saturating_add(BESIDE_BYTES).to_string();
    for folder in folders {
        for name in ["memory.limit_in_bytes", "memory.max"] {
            let path = folder.join(name);
            if path.exists() {
                let limited = fs::write(&path, &most);
                limited.map_err(ShimError::host(format!("cannot write {}", path.display())))?;
            }
        }
        let procs = folder.join("cgroup.procs");
        fs::File::options()
            .write(true)
            .open(&procs)
            .and_then(|mut file| file.write_all(b"0"))
            .map_err(ShimError::host(format!("cannot enter {}", procs.display())))?;
    }
    Ok(())
}

/// The path of a group below where its hierarchy is mounted.
fn path(named: &str) -> Result<PathBuf> {
    let parts: Vec<&str> = named.split(':').collect();
    let path = match parts[..] {
        [slice, prefix, name] if !named.contains('/') => systemd(slice, prefix, name),
        _ => PathBuf::from(named.trim_start_matches('/')),
    };
    let plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    match plain && path.components().next().is_some() {
        true => Ok(path),
        false => Err(refused(
            format_args!("the control group {named:?} (linux.cgroupsPath)"),
            "name one below the root, without ..",
        )),
    }
}

/// Where systemd has the unit of a slice (systemd.slice(5)).
fn systemd(slice: &str, prefix: &str, name: &str) -> PathBuf {
    let slice = if slice.is_empty() { "system.slice" } else { slice };
    let mut path = PathBuf::new();
    let whole = slice.trim_end_matches(".slice").trim_matches('-');
    let ends = whole.match_indices('-').map(|(at, _)| at).chain([whole.len()]);
    for above in ends.filter_map(|end| whole.get(..end)).filter(|above| !above.is_empty()) {
        path.push(format!("{above}.slice"));
    }
    path.push(match (name.ends_with(".slice"), prefix) {
        (true, _) => name.to_owned(),
        (false, "") => format!("{name}.scope"),
        (false, prefix) => format!("{prefix}-{name}.scope"),
    });
    path
}

/// Where hierarchies are mounted whole (proc_pid_mountinfo(5)), each once.
fn mounted(text: &str) -> Vec<PathBuf> {
    let (mut found, mut seen) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let (Some(device), Some(&"/"), Some(at)) = (left.get(2), left.get(3), left.get(4)) else {
            continue;
        };
        let is_group = matches!(right.split(' ').next(), Some("cgroup" | "cgroup2"));
        if is_group && !seen.contains(device) {
            seen.push(device);
            found.push(PathBuf::from(at));
        }
    }
    found
}

/// Makes a group and those above it.
fn made(folder: &Path) -> std::io::Result<()> {
    let mut missing: Vec<&Path> = folder.ancestors().take_while(|path| !path.exists()).collect();
    while let Some(path) = missing.pop() {
        let above = path.parent().unwrap_or(path);
        for controller in CONTROLLERS {
            // Of version 2; one that the host does not have, or does not pass on, counts nothing.
            let _ = fs::write(above.join("cgroup.subtree_control"), format!("+{controller}"));
        }
        match fs::create_dir(path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        // Of version 1, where a new one has no processor and no memory.
        for name in ["cpuset.cpus", "cpuset.mems"] {
            let own = fs::read_to_string(path.join(name));
            if own.is_ok_and(|own| own.trim().is_empty())
                && let Ok(given) = fs::read_to_string(above.join(name))
            {
                let _ = fs::write(path.join(name), given);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_named_by_its_path_or_as_systemd_names_it() {
        let of = |named: &str| path(named).unwrap().display().to_string();
        assert_eq!(of("/kubepods/podx/c"), "kubepods/podx/c");
        assert_eq!(
            of("kubepods-burstable-podx.slice:cri-containerd:c"),
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice/\
             cri-containerd-c.scope"
        );
        assert_eq!(of(":docker:c"), "system.slice/docker-c.scope");
        assert_eq!(of("-.slice::c"), "c.scope");
        for bad in ["/", "/a/../b", ".."] {
            assert!(path(bad).unwrap_err().to_string().contains("cgroupsPath"), "{bad}");
        }
    }

    #[test]
    fn each_hierarchy_is_found_once() {
        let text = "30 25 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                    31 25 0:26 / /other/cpu rw - cgroup cgroup rw,cpu\n\
                    32 25 0:27 /part /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
                    33 25 0:28 / /sys/fs/cgroup/unified rw shared:3 - cgroup2 cgroup2 rw\n\
                    34 25 0:29 / /sys rw - sysfs sysfs rw\n";
        let found = mounted(text);
        assert_eq!(found, ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/unified"].map(PathBuf::from));
    }
}
