//! The mounts of a specification, in the program's own mount namespace.
//!
//! What shows its process's other namespaces (`proc`, `cgroup`), and what lies below, is mounted by
//! the program's process itself ([`InChild`]); the rest by the thread that starts it.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};

use exocell_agent::oci::{Mount, Spec};
use nix::mount::{MsFlags, mount};

use crate::dev::{make_devices, make_mount_point};
use crate::error::{Context, InitError};
use crate::mounting;
use crate::paths::{Missing, MountPoints};

/// Mounts that lie nowhere, by the names that the specification has for them.
pub type Binds = BTreeMap<String, File>;

const SAFE: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);
/// What the boot has laid out, whatever else a specification says of them: nodes, and the
/// terminals' own file system.
const OF_BOOT: [&str; 2] = ["/dev", "/dev/pts"];

/// What the program's process does before it becomes its program.
pub enum InChild {
    Mount {
        source: CString,
        target: CString,
        kind: CString,
        flags: libc::c_ulong,
        data: CString,
    },
    /// Covers a file or a directory, if there is one.
    Mask(CString),
    /// Makes what is there read-only.
    ReadOnly {
        target: CString,
        flags: libc::c_ulong,
    },
}

/// Mounts what can be mounted now; the rest. `image` is what the container's image holds, `binds`
/// what is bound where that is not in the root.
pub fn mount_all(
    spec: &Spec,
    image: Option<&File>,
    mut binds: Option<Binds>,
) -> Result<Vec<InChild>, InitError> {
    let mut later = Vec::new();
    let points = MountPoints::new(image).context(|| "the root")?;
    for wanted in &spec.mounts {
        mount_one(wanted, &points, binds.as_mut(), &mut later)?;
    }
    make_devices(&spec.linux.devices)?;
    if spec.root.as_ref().is_some_and(|root| root.readonly) {
        remount("/", MsFlags::MS_RDONLY)?;
    }
    for path in &spec.linux.masked_paths {
        later.push(InChild::Mask(c_string(path)?));
    }
    for path in &spec.linux.readonly_paths {
        let flags = (SAFE | MsFlags::MS_RDONLY).bits();
        later.push(InChild::ReadOnly { target: c_string(path)?, flags });
    }
    Ok(later)
}

fn mount_one(
    wanted: &Mount,
    points: &MountPoints<'_>,
    binds: Option<&mut Binds>,
    later: &mut Vec<InChild>,
) -> Result<(), InitError> {
    let target = wanted.destination.as_str();
    if !target.starts_with('/') {
        return Err(InitError::invalid(format!("the mount on {target}: give an absolute path")));
    }
    let Options { flags, mut data } = options(&wanted.options)
        .map_err(|option| InitError::invalid(format!("the mount on {target}: {option}")))?;
    match wanted.kind.as_str() {
        _ if OF_BOOT.contains(&target) => return Ok(()),
        // One for all that the cell's kernel shows of itself; made at the boot.
        "sysfs" if target == "/sys" => return remount(target, flags),
        // What shows a process's namespaces lies where the kernel's own is.
        "proc" | "cgroup" | "cgroup2" => {
            make_mount_point(target)?;
            let kind = if wanted.kind == "proc" { "proc" } else { "cgroup2" };
            let data = if kind == "proc" { String::new() } else { "nsdelegate".to_owned() };
            later.push(InChild::Mount {
                source: c_string(kind)?,
                target: c_string(target)?,
                kind: c_string(kind)?,
                flags: flags.bits(),
                data: c_string(&data)?,
            });
            return Ok(());
        }
        _ => {}
    }
    if flags.contains(MsFlags::MS_BIND) {
        let flags = flags - MsFlags::MS_BIND;
        return match binds {
            Some(binds) => put_bind(wanted, points, flags, binds),
            None => bind(wanted, points, flags),
        };
    }
    let covered = points.find(target, Missing::Nothing)?;
    if let Some(covered) = covered.filter(|_| wanted.kind == "tmpfs") {
        add_mode(&covered, &mut data);
    }
    let place = points.directory(target)?;
    let kind = wanted.kind.as_str();
    let source = if wanted.source.is_empty() { kind } else { &wanted.source };
    let made = mounting::make(kind, source, flags, &data);
    let put = made.and_then(|made| mounting::put(&made, &place));
    put.context(|| format!("mounting {kind} on {target}"))
}

/// Shows what lies at the source at the target too.
fn bind(wanted: &Mount, points: &MountPoints<'_>, flags: MsFlags) -> Result<(), InitError> {
    let (source, target) = (&wanted.source, &wanted.destination);
    let failed = || format!("mounting {source} on {target}");
    let found = File::options().read(true).custom_flags(libc::O_PATH).open(source);
    let found = found.context(failed)?;
    let is_directory = found.metadata().context(failed)?.is_dir();
    let place = if is_directory { points.directory(target) } else { points.file(target) }?;
    let own = flags - MsFlags::MS_REC;
    let show = || -> io::Result<()> {
        let copied = mounting::copy(&found, flags.contains(MsFlags::MS_REC))?;
        if !own.is_empty() {
            mounting::change(&copied, own)?;
        }
        mounting::put(&copied, &place)
    };
    show().context(failed)
}

/// Has what was taken of the depot for `wanted` lie at the target.
fn put_bind(
    wanted: &Mount,
    points: &MountPoints<'_>,
    flags: MsFlags,
    binds: &mut Binds,
) -> Result<(), InitError> {
    let target = &wanted.destination;
    let taken = binds.remove(&wanted.source);
    let taken = taken.ok_or_else(|| InitError::invalid(format!("nothing is to be on {target}")))?;
    let failed = || format!("mounting on {target}");
    let is_directory = taken.metadata().context(failed)?.is_dir();
    let place = if is_directory { points.directory(target) } else { points.file(target) }?;
    let put = || {
        mounting::change(&taken, flags - MsFlags::MS_REC)?;
        mounting::put(&taken, &place)
    };
    put().context(failed)
}

/// Gives what is mounted at `target` other flags, in this namespace alone.
fn remount(target: &str, flags: MsFlags) -> Result<(), InitError> {
    let flags = flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
    mount(None::<&str>, target, None::<&str>, flags, None::<&str>)
        .context(|| format!("changing the mount on {target}"))
}

/// A file system in memory has the mode of the directory that it covers, if there is one.
fn add_mode(target: &File, data: &mut String) {
    let says = data.split(',').any(|option| option.starts_with("mode="));
    if let (false, Ok(covered)) = (says, target.metadata()) {
        let comma = if data.is_empty() { "" } else { "," };
        data.push_str(&format!("{comma}mode={:o}", covered.permissions().mode() & 0o7777));
    }
}

/// Options of the OCI runtime specification that no file system has, and no mount of a cell. Those
/// with `r` before are for all below a mount: who binds tells the guest of one mount.
const NOT_CARRIED_OUT: [&str; 30] = [
    "shared",
    "rshared",
    "slave",
    "rslave",
    "unbindable",
    "runbindable",
    "tmpcopyup",
    "idmap",
    "ridmap",
    "remount",
    "nosymfollow",
    "symfollow",
    "rro",
    "rrw",
    "rnosuid",
    "rsuid",
    "rnodev",
    "rdev",
    "rnoexec",
    "rexec",
    "rnoatime",
    "ratime",
    "rnodiratime",
    "rdiratime",
    "rrelatime",
    "rnorelatime",
    "rstrictatime",
    "rnostrictatime",
    "rnosymfollow",
    "rsymfollow",
];

#[derive(Debug, PartialEq)]
struct Options {
    flags: MsFlags,
    /// For the file system itself.
    data: String,
}

/// Options as mount(8) has them.
///
/// # Errors
/// Says which one cannot be carried out.
fn options(words: &[String]) -> Result<Options, String> {
    let mut options = Options { flags: MsFlags::empty(), data: String::new() };
    for word in words {
        let (flag, set) = match word.as_str() {
            "ro" => (MsFlags::MS_RDONLY, true),
            "rw" => (MsFlags::MS_RDONLY, false),
            "nosuid" => (MsFlags::MS_NOSUID, true),
            "suid" => (MsFlags::MS_NOSUID, false),
            "nodev" => (MsFlags::MS_NODEV, true),
            "dev" => (MsFlags::MS_NODEV, false),
            "noexec" => (MsFlags::MS_NOEXEC, true),
            "exec" => (MsFlags::MS_NOEXEC, false),
            "sync" => (MsFlags::MS_SYNCHRONOUS, true),
            "async" => (MsFlags::MS_SYNCHRONOUS, false),
            "noatime" => (MsFlags::MS_NOATIME, true),
            "atime" => (MsFlags::MS_NOATIME, false),
            "nodiratime" => (MsFlags::MS_NODIRATIME, true),
            "diratime" => (MsFlags::MS_NODIRATIME, false),
            "relatime" => (MsFlags::MS_RELATIME, true),
            "norelatime" => (MsFlags::MS_RELATIME, false),
            "strictatime" => (MsFlags::MS_STRICTATIME, true),
            "nostrictatime" => (MsFlags::MS_STRICTATIME, false),
            "bind" => (MsFlags::MS_BIND, true),
            "rbind" => (MsFlags::MS_BIND.union(MsFlags::MS_REC), true),
            // All of a cell's mounts are.
            "private" | "rprivate" | "defaults" | "silent" | "loud" => continue,
            word if NOT_CARRIED_OUT.contains(&word) => return Err(not_carried_out(word)),
            data => {
                if !options.data.is_empty() {
                    options.data.push(',');
                }
                options.data.push_str(data);
                continue;
            }
        };
        options.flags.set(flag, set);
    }
    // No file system is made that would refuse it.
    let is_bind = options.flags.contains(MsFlags::MS_BIND);
    match &options {
        Options { data, .. } if is_bind && !data.is_empty() => Err(not_carried_out(data)),
        Options { flags, .. } if is_bind && flags.contains(MsFlags::MS_SYNCHRONOUS) => {
            Err(not_carried_out("sync"))
        }
        _ => Ok(options),
    }
}

fn not_carried_out(word: &str) -> String {
    format!("the option {word} is not carried out; leave it out")
}

fn c_string(text: &str) -> Result<CString, InitError> {
    CString::new(text).map_err(|_| InitError::invalid("a mount's path or option holds a NUL byte"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_flags_or_the_file_systems_own_and_the_last_wins() {
        let read = |text: &str| options(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let found = read("nosuid noexec exec size=1m rprivate mode=700").unwrap();
        assert_eq!((found.flags, found.data.as_str()), (MsFlags::MS_NOSUID, "size=1m,mode=700"));
        assert!(read("rshared").unwrap_err().contains("rshared"));
        // A bind makes no file system that would refuse a word that it does not know.
        for word in ["rro", "readonly", "RO", "size=1m", "sync"] {
            let refused = read(&format!("rbind {word}")).map(|options| options.flags);
            assert!(refused.unwrap_err().contains(&format!("the option {word}")), "{word}");
        }
        assert_eq!(
            read("rbind ro noatime atime").unwrap().flags - MsFlags::MS_REC,
            MsFlags::MS_BIND | MsFlags::MS_RDONLY
        );
    }
}
