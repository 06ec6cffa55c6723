//! The mounts that containerd hands over for a root file system (`containerd.types.Mount`).

use std::path::{Component, Path, PathBuf};

use containerd_shim_protos::api::Mount;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use crate::error::{Result, ShimError};
use crate::refusal::refused;

/// The longest options that mount(2) takes, in bytes: a page, with a byte to end them.
const DATA_BYTES_MAX: usize = 4095;

/// Options that are flags of mount(2), and whether they set them.
const FLAGS: [(&str, MsFlags, bool); 18] = [
    ("bind", MsFlags::MS_BIND, true),
    ("rbind", MsFlags::MS_BIND.union(MsFlags::MS_REC), true),
    ("ro", MsFlags::MS_RDONLY, true),
    ("rw", MsFlags::MS_RDONLY, false),
    ("nosuid", MsFlags::MS_NOSUID, true),
    ("suid", MsFlags::MS_NOSUID, false),
    ("nodev", MsFlags::MS_NODEV, true),
    ("dev", MsFlags::MS_NODEV, false),
    ("noexec", MsFlags::MS_NOEXEC, true),
    ("exec", MsFlags::MS_NOEXEC, false),
    ("noatime", MsFlags::MS_NOATIME, true),
    ("atime", MsFlags::MS_NOATIME, false),
    ("nodiratime", MsFlags::MS_NODIRATIME, true),
    ("relatime", MsFlags::MS_RELATIME, true),
    ("strictatime", MsFlags::MS_STRICTATIME, true),
    ("sync", MsFlags::MS_SYNCHRONOUS, true),
    ("async", MsFlags::MS_SYNCHRONOUS, false),
    ("defaults", MsFlags::empty(), true),
];

/// Flags and the file system's own options.
fn options(words: &[String]) -> (MsFlags, Vec<String>) {
    let (mut flags, mut data) = (MsFlags::empty(), Vec::new());
    for word in words {
        match FLAGS.iter().find(|(name, _, _)| name == word) {
            Some((_, flag, set)) => flags.set(*flag, *set),
            None => data.push(word.clone()),
        }
    }
    (flags, data)
}

/// Mounts all of `wanted` on `target`, one on the other; the caller is in a mount namespace of its
/// own. What is mounted already when one fails is taken away.
///
/// # Errors
/// The host's, or one that is not for the host to do.
pub fn mount_all(wanted: &[Mount], target: &Path) -> Result<()> {
    for (count, one) in wanted.iter().enumerate() {
        if let Err(error) = mount_one(one, target) {
            unmount(target, count);
            return Err(error);
        }
    }
    Ok(())
}

/// Takes so many mounts of `target` away, at once for whoever comes later.
pub fn unmount(target: &Path, count: usize) {
    for _ in 0..count {
        let _ = umount2(target, MntFlags::MNT_DETACH);
    }
}

fn mount_one(wanted: &Mount, target: &Path) -> Result<()> {
    let Mount { type_: kind, source, options: words, .. } = wanted;
    if !wanted.target.is_empty() {
        return Err(refused(
            format_args!("a root file system with a mount of its own at {}", wanted.target),
            "use another snapshotter (overlayfs)",
        ));
    }
    if words.iter().any(|word| word == "loop") || kind.contains('/') {
        return Err(refused(
            format_args!("a root file system of type {kind} on a loop device"),
            "use another snapshotter (overlayfs)",
        ));
    }
    let (flags, data) = options(words);
    let failed = || ShimError::host(format!("cannot mount the root file system ({kind} {source})"));
    if flags.contains(MsFlags::MS_BIND) {
        let only = flags & (MsFlags::MS_BIND | MsFlags::MS_REC);
        let none = None::<&str>;
        mount(Some(source.as_str()), target, none, only, none).map_err(failed())?;
        if flags.contains(MsFlags::MS_RDONLY) {
            let flags = flags | MsFlags::MS_REMOUNT;
            mount(none, target, none, flags, none).map_err(failed())?;
        }
        return Ok(());
    }
    let text = data.join(",");
    if text.len() <= DATA_BYTES_MAX {
        return mount(
            Some(source.as_str()),
            target,
            Some(kind.as_str()),
            flags,
            Some(text.as_str()),
        )
        .map_err(failed());
    }
    let (base, text) =
        shortened(&data).filter(|(_, text)| text.len() <= DATA_BYTES_MAX).ok_or_else(|| {
            ShimError::invalid("the root file system has too many layers for an overlay".to_owned())
        })?;
    let mounted = in_directory(&base, || {
        mount(Some(source.as_str()), target, Some(kind.as_str()), flags, Some(text.as_str()))
    });
    mounted?.map_err(failed())
}

/// Options of an overlay with the paths of its lower layers relative to a directory that all of
/// them are in; that directory. `None` where there is none but the root.
fn shortened(data: &[String]) -> Option<(PathBuf, String)> {
    let lower = data.iter().find_map(|option| option.strip_prefix("lowerdir="))?;
    let layers: Vec<&Path> = lower.split(':').map(Path::new).collect();
    let mut base: Vec<Component> = layers.first()?.parent()?.components().collect();
    for layer in &layers {
        let same = base.iter().zip(layer.components()).take_while(|(one, other)| **one == *other);
        let length = same.count();
        base.truncate(length);
    }
    let base: PathBuf = base.iter().collect();
    base.parent()?;
    let relative = layers.iter().map(|layer| layer.strip_prefix(&base).ok()?.to_str());
    let relative = relative.collect::<Option<Vec<_>>>()?.join(":");
    let others = data.iter().filter(|option| !option.starts_with("lowerdir="));
    let all: Vec<String> = others.cloned().chain([format!("lowerdir={relative}")]).collect();
    Some((base, all.join(",")))
}

/// Does `action` in a directory that no other thread is in.
fn in_directory<T: Send>(path: &Path, action: impl FnOnce() -> T + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS).and_then(|()| nix::unistd::chdir(path)).map(|()| action())
        });
        let done = thread.join().map_err(|_| ShimError::internal("a thread panicked"))?;
        done.map_err(ShimError::host(format!("cannot enter {}", path.display())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(',').map(str::to_owned).collect()
    }

    #[test]
    fn options_are_flags_or_the_file_systems_own() {
        let (flags, data) = options(&words("rbind,ro,upperdir=/u,nosuid,suid"));
        assert_eq!(flags, MsFlags::MS_BIND | MsFlags::MS_REC | MsFlags::MS_RDONLY);
        assert_eq!(data, ["upperdir=/u"]);
    }

    #[test]
    fn many_layers_are_named_from_a_directory_that_all_are_in() {
        let data = words("upperdir=/s/9/fs,lowerdir=/s/snap/1/fs:/s/snap/12/fs");
        let (base, text) = shortened(&data).unwrap();
        assert_eq!(base, Path::new("/s/snap"));
        assert_eq!(text, "upperdir=/s/9/fs,lowerdir=1/fs:12/fs");
        assert!(shortened(&words("lowerdir=/a/1:/b/2")).is_none());
        assert!(shortened(&words("upperdir=/a")).is_none());
    }

    #[test]
    fn what_the_host_does_not_mount_is_refused_by_name() {
        let wanted = Mount {
            type_: "erofs".to_owned(),
            source: "/l".to_owned(),
            options: words("ro,loop"),
            ..Mount::default()
        };
        let error = mount_one(&wanted, Path::new("/nowhere")).unwrap_err().to_string();
        assert!(error.contains("erofs") && error.contains("snapshotter"), "{error}");
    }
}
