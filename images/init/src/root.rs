//! The root file system, from the image's disk to a place to run programs in.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use exocell_agent::Boot;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use nix::sys::stat::Mode;
use nix::unistd::{chdir, chroot, pivot_root, sethostname};

use crate::cgroup::{Group, Groups};
use crate::error::{Context, InitError};
use crate::transfer::UPPER;
use crate::{dev, folders, isolates, log, network, own_proc, paths, sys};

const IMAGE: &str = "/image";
const PRIVATE: &str = "/private";
const ROOT: &str = "/root";
/// Where the depot's device is mounted; from the first root.
pub const DEPOT: &str = "/depot";
/// How often a disk that is not there yet is tried, a millisecond apart.
const DISK_TRIES: u32 = 1000;
/// docker's limit on open files.
const OPEN_FILES_MAX: u64 = 1_048_576;

/// What the running cell is made of.
pub struct Cell {
    /// The control group of the cell's own program.
    pub group: Group,
    /// That of all programs.
    pub groups: Groups,
    /// The root of the private ext4 file system, which lies out of sight.
    pub private: Option<File>,
    /// What the image holds, out of sight; `None` where it is all of the root.
    pub image: Option<File>,
    /// The root of the file system of terminals.
    pub terminals: File,
    /// /dev/null as it was before any program could put something in its place.
    pub null: File,
    /// The first root, below the cell's: what is mounted out of sight is mounted there.
    pub bottom: File,
    /// The disk that the image is on, behind which those of other containers appear; `None` where
    /// there is a depot.
    pub disk: Option<File>,
    /// How it was set up.
    pub boot: Boot,
}

impl Cell {
    /// The root of the image, below what was changed of it.
    pub fn image(&self) -> Result<File, InitError> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let opened = openat(&self.bottom, IMAGE.trim_start_matches('/'), flags, Mode::empty());
        opened.map(File::from).context(|| "opening the image")
    }
}

/// Sets the cell up as `boot` says. On return this process is in the new root.
pub fn set_up(boot: &Boot) -> Result<Cell, InitError> {
    own_proc::make()?;
    let (private, image) = assemble(boot)?.unzip();
    let bottom = File::open("/").context(|| "the first root")?;
    let disk = match boot.depot {
        Some(_) => None,
        None => Some(File::open(&boot.root_device).context(|| &boot.root_device)?),
    };
    let opened = boot.isolates.as_ref().map(isolates::open).transpose()?;
    switch()?;
    let read_only = private.is_none();
    dev::mount_all(image.as_ref())?;
    let terminals = File::open("/dev/pts").context(|| "/dev/pts")?;
    let null = File::open("/dev/null").context(|| "/dev/null")?;
    name_host(&Named::of_cell(boot), boot, read_only)?;
    sys::loopback_up().context(|| "bringing the loopback interface up")?;
    if let Some(setup) = &boot.network {
        network::set_up(setup)?;
        if boot.depot.is_none() {
            network::show(setup, read_only)?;
        }
    }
    if let (Some(setup), Some(opened)) = (&boot.isolates, &opened) {
        isolates::set_up(setup, opened)?;
    }
    let (groups, group) = Groups::make(boot.process_count_max)?;
    set_defaults(boot.process_count_max);
    folders::mount_all(&boot.folders, private.as_ref(), image.as_ref())?;
    dev::seal()?;
    let boot = boot.clone();
    Ok(Cell { group, groups, private, image, terminals, null, bottom, disk, boot })
}

/// Mounts the image, and the overlay over it, on [`ROOT`]; the private file system and the image
/// where there is one.
fn assemble(boot: &Boot) -> Result<Option<(File, File)>, InitError> {
    for directory in [IMAGE, PRIVATE, ROOT] {
        fs::create_dir_all(directory).context(|| directory)?;
    }
    if let Some(tag) = &boot.depot {
        mount_depot(tag)?;
        return Ok(None);
    }
    let Some(overlay) = &boot.overlay_device else {
        mount_disk(&boot.root_device, ROOT, "erofs", MsFlags::MS_RDONLY)?;
        return Ok(None);
    };
    mount_disk(&boot.root_device, IMAGE, "erofs", MsFlags::MS_RDONLY)?;
    mount_disk(overlay, PRIVATE, "ext4", MsFlags::MS_NOATIME)?;
    mount_overlay(IMAGE, PRIVATE, ROOT)?;
    let open = |path: &str| File::open(path).context(|| path.to_owned());
    Ok(Some((open(PRIVATE)?, open(IMAGE)?)))
}

/// Mounts the depot, and for the cell itself a root with nothing in it: no program sees that.
fn mount_depot(tag: &str) -> Result<(), InitError> {
    fs::create_dir_all(DEPOT).context(|| DEPOT)?;
    let (none, flags) = (None::<&str>, MsFlags::MS_NODEV);
    mount(Some(tag), DEPOT, Some("virtiofs"), flags, none).context(|| "mounting the depot")?;
    mount(Some("root"), ROOT, Some("tmpfs"), flags, Some("mode=755,size=1m"))
        .context(|| "mounting the cell's root")
}

/// Mounts a block device of the cell on `target`, once it is there.
pub fn mount_disk(device: &str, target: &str, kind: &str, flags: MsFlags) -> Result<(), InitError> {
    let try_mount = || mount(Some(device), target, Some(kind), flags, None::<&str>);
    let mut result = try_mount();
    for _ in 0..DISK_TRIES {
        if !matches!(result, Err(Errno::ENOENT | Errno::ENXIO | Errno::ENODEV)) {
            break;
        }
        sleep(Duration::from_millis(1));
        result = try_mount();
    }
    result.context(|| format!("mounting {device} as {kind}"))
}

/// Mounts on `target` what `image` holds, and the changes to it in the directory `private`.
pub fn mount_overlay(image: &str, private: &str, target: &str) -> Result<(), InitError> {
    make_layers(image, private).context(|| "preparing the private overlay")?;
    // redirect_dir: directories of the image can be renamed; xino: one st_dev
    // for all files, which `find -xdev` and `du -x` go by.
    let options = format!(
        "lowerdir={image},upperdir={private}/{UPPER},workdir={private}/work,redirect_dir=on,xino=auto"
    );
    mount(Some("overlay"), target, Some("overlay"), MsFlags::MS_NOATIME, Some(options.as_str()))
        .context(|| "mounting the overlay")
}

/// The merged root directory takes its owner and mode from the upper one.
fn make_layers(image: &str, private: &str) -> io::Result<()> {
    let (upper, work) = (format!("{private}/{UPPER}"), format!("{private}/work"));
    fs::create_dir_all(&work)?;
    if !Path::new(&upper).exists() {
        fs::create_dir(&upper)?;
        let image = fs::metadata(image)?;
        chown(&upper, Some(image.uid()), Some(image.gid()))?;
        fs::set_permissions(&upper, fs::Permissions::from_mode(image.mode()))?;
    }
    Ok(())
}

/// Makes [`ROOT`] the root of the mount namespace. The initramfs cannot be
/// pivoted away, so the new root is moved over it, as switch_root(8) does.
fn switch() -> Result<(), InitError> {
    let _ = umount2("/dev", MntFlags::MNT_DETACH);
    let enter = || {
        // Nothing is made there any more, and this program lies there.
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(None::<&str>, "/", None::<&str>, flags, None::<&str>)?;
        chdir(ROOT)?;
        mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)?;
        chroot(".")?;
        chdir("/")
    };
    enter().context(|| "switching to the new root")
}

/// Makes `merged`, a mount below the working directory, the root of this thread's namespace, and
/// detaches all the rest.
pub fn switch_to(merged: &str) -> nix::Result<()> {
    chroot(".")?;
    // What lies on it is the cell's own root.
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir(merged)?;
    // The old root comes to lie on the new one.
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")
}

/// What a container is called.
pub struct Named<'a> {
    pub hostname: &'a str,
    pub domain_name: &'a str,
}

impl<'a> Named<'a> {
    fn of_cell(boot: &'a Boot) -> Self {
        Self { hostname: &boot.hostname, domain_name: &boot.domain_name }
    }
}

/// Sets the host name, and the files of /etc that docker writes too. Without a
/// network an absent resolv.conf is made empty and another one is kept.
pub fn name_host(named: &Named, boot: &Boot, read_only: bool) -> Result<(), InitError> {
    let name = named.hostname;
    if name.is_empty() {
        return Ok(());
    }
    sethostname(name).context(|| format!("setting the host name {name}"))?;
    let files = [("hosts", hosts(named, boot)), ("hostname", format!("{name}\n"))];
    for (file, content) in files {
        put_file(file, &content, read_only);
    }
    if boot.network.is_none() && !read_only && fs::symlink_metadata("/etc/resolv.conf").is_err() {
        put_file("resolv.conf", "", read_only);
    }
    Ok(())
}

/// /etc/hosts: the loopback's names, those that were asked for, the cell's own.
fn hosts(named: &Named, boot: &Boot) -> String {
    let mut text = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n".to_owned();
    for (name, address) in &boot.hosts {
        text.push_str(&format!("{address}\t{name}\n"));
    }
    let (name, domain) = (named.hostname, named.domain_name);
    // Where others reach it, if there are others.
    let joined = boot.network.as_ref().and_then(|network| network.joined.first());
    let own = joined.map_or(std::net::Ipv4Addr::LOCALHOST, |joined| joined.address);
    match domain.is_empty() {
        true => text + &format!("{own}\t{name}\n"),
        false => text + &format!("{own}\t{name}.{domain} {name}\n"),
    }
}

/// Writes /etc/`name`, or covers it where the root cannot be written.
pub fn put_file(name: &str, content: &str, read_only: bool) {
    let written = match read_only {
        true => cover_file(name, content),
        false => write_file(name, content),
    };
    if let Err(error) = written {
        log::warn(format_args!("/etc/{name} stays as the image has it: {error}"));
    }
}

fn write_file(name: &str, content: &str) -> io::Result<()> {
    fs::create_dir_all("/etc")?;
    // A link may lead to where no program of the cell puts anything.
    paths::write("/etc", name, content.as_bytes())
}

/// Binds a file with `content` over /etc/`name` of a read-only root.
fn cover_file(name: &str, content: &str) -> io::Result<()> {
    let (source, target) = (format!("/run/exocell/{name}"), format!("/etc/{name}"));
    fs::create_dir_all("/run/exocell")?;
    fs::write(&source, content)?;
    let (source, target) = (source.as_str(), target.as_str());
    Ok(mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)?)
}

/// Limits and settings, docker's but for the last; each is optional.
fn set_defaults(process_count_max: u64) {
    let limits =
        [(Resource::RLIMIT_NOFILE, OPEN_FILES_MAX), (Resource::RLIMIT_NPROC, RLIM_INFINITY)];
    for (resource, limit) in limits {
        if let Err(errno) = setrlimit(resource, limit, limit) {
            log::warn(format_args!("limit {resource:?}: {errno}"));
        }
    }
    let settings = [
        ("sys/net/ipv4/ip_unprivileged_port_start", "0"),
        ("sys/net/ipv4/ping_group_range", "0 2147483647"),
        // What one program holds by a lease another waits for, the operator's too (fcntl(2)).
        ("sys/fs/lease-break-time", "2"),
        // Addresses of the kernel are nobody's but root's.
        ("sys/kernel/kptr_restrict", "1"),
    ];
    for (path, value) in settings {
        own_proc::write(path, value);
    }
    // Nothing waits a timer tick or more for a grace period of two CPUs: unmounts and the
    // power-off take half the time.
    let _ = fs::write("/sys/kernel/rcu_expedited", "1");
    leave_threads(process_count_max);
}

/// Lets the kernel have more threads than programs may, so that there are some left for this
/// process when programs have all of theirs.
fn leave_threads(process_count_max: u64) {
    const OWN_THREADS: u64 = 1024;
    let path = "sys/kernel/threads-max";
    let now = own_proc::read(path).trim().parse::<u64>().ok();
    let wanted = process_count_max.saturating_add(OWN_THREADS);
    if now.is_some_and(|now| now < wanted) {
        own_proc::write(path, &wanted.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_the_loopback_those_asked_for_and_the_cell() {
        let boot = Boot {
            hostname: "here".to_owned(),
            hosts: vec![("db".to_owned(), [10, 0, 0, 7].into())],
            domain_name: "example.org".to_owned(),
            ..Boot::default()
        };
        let text = |boot: &Boot| hosts(&Named::of_cell(boot), boot);
        assert!(text(&boot).ends_with("10.0.0.7\tdb\n127.0.0.1\there.example.org here\n"));
        let named = Named { hostname: "there", domain_name: "" };
        assert!(hosts(&named, &boot).ends_with("10.0.0.7\tdb\n127.0.0.1\tthere\n"));
        let plain = Boot { hostname: "here".to_owned(), ..Boot::default() };
        assert!(text(&plain).ends_with("loopback\n127.0.0.1\there\n"));
    }
}
