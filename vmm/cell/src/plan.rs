//! The checked plan: everything a cell needs, found and opened, before any
//! process is made for it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use exocell_agent::{Boot, Exec, ISOLATES_MODELS, IsolatesSetup, Start, TtySize};
use exocell_images::walk::Found;
use exocell_images::{ImageConfig, Rootfs, Store};
use exocell_network::Secret;
use exocell_pager::Mode;
use exocell_vmm::host;
use exocell_vmm::intra::Intra;
use exocell_vmm::limits::Limits;
use exocell_vmm::memory::GuestMemory;
use exocell_vmm::platform::Platform;
use exocell_xgate::{CapabilitySet, Folder, Rights};

pub(crate) mod device;
pub mod image;
pub mod kernel;
pub mod sidecar;

use self::device::Device;
use crate::disk::{self, Life};
use crate::folder::{DEPOT, Share};
use crate::health::{Check, merged};
use crate::logging::Steps;
use crate::network::PlannedNetwork;
use crate::parent::Parent;
use crate::socket::Socket;
use crate::{CellError, CellSpec, Layout, Record, command, granted, initramfs, models, oci};

/// Less memory than this and the guest kernel does not reach its init.
pub const MEMORY_BYTES_MIN: u64 = 24 << 20;
/// The guest kernel is built for this many.
pub const VCPUS_MAX: u32 = 16;
/// The terminal of a program whose operator has none.
pub const TTY_SIZE_DEFAULT: TtySize = TtySize { rows: 24, cols: 80 };
/// The disks that others may have, too: the image's, the command's where the cell starts isolates,
/// and that of their models.
/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;
const ROOT_DISK: &str = "rootfs";
const COMMAND_DISK: &str = "command";
const MODELS_DISK: &str = "models";
/// Where programs are looked for unless the image says so.
pub const PATH_DEFAULT: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A `vm` cell that can be started.
pub struct VmPlan {
    /// What runs the guest.
    pub(crate) platform: Box<dyn Platform>,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// All of the guest's. The image's file system is the first, held against removal.
    pub(crate) devices: Vec<Device>,
    /// Those of the host that its programs connect to.
    pub(crate) sockets: Vec<Socket>,
    /// Whether the overlay is to be whole when the cell has ended.
    pub keeps_disk: bool,
    pub memory: GuestMemory,
    /// What it may have of the host beside that memory.
    pub limits: Limits,
    pub pager: Mode,
    /// Whether the guest kernel binds memory in pieces of 64 KB where it can.
    pub blocks: bool,
    /// Mappings that the host allows a process of the guest kernel's.
    pub mappings_max: Option<u64>,
    /// What is set aside for it from the beginning: all its memory, unless it has that
    /// by credit.
    pub guarantee_bytes: u64,
    /// What that has to be within; the file need not exist.
    pub budget: PathBuf,
    pub intra: Intra,
    /// Whether it uses pages of its image as the host has them.
    shares_image: bool,
    pub vcpus: u32,
    pub cpu_weight: u32,
    pub deadline: Option<Duration>,
    /// Whether anyone hears what the program writes.
    pub stdio: bool,
    /// What its network device leads to, if it has one.
    pub network: Option<PlannedNetwork>,
    pub boot: Boot,
    pub start: Start,
    /// How the program is looked after.
    pub health: Option<Check>,
}

/// A host folder, opened for isolates.
pub struct PlannedFolder {
    pub dir: OwnedFd,
    pub granted: Folder,
}

impl VmPlan {
    /// Checks `spec` against the host and opens what it names. `secrets` are
    /// not of the spec, which is written down.
    pub fn new(
        layout: &Layout,
        spec: &CellSpec,
        caps: &CapabilitySet,
        tty: Option<TtySize>,
        secrets: Vec<Secret>,
    ) -> Result<Self, CellError> {
        Parent::refuse_cells()?;
        let mut steps = Steps::begin();
        let memory_bytes = memory(caps)?;
        let cpu = caps.require_cpu()?;
        if cpu.count == 0 || cpu.count > VCPUS_MAX {
            return Err(CellError::Usage(format!(
                "{} vCPUs are not possible; grant 1 to {VCPUS_MAX} (cpu.count, --cpus)",
                cpu.count
            )));
        }
        refuse_root_folder(caps)?;
        refuse_kernels_own(caps)?;
        refuse_layers(caps)?;
        let platform = kernel::platform(spec, !secrets.is_empty())?;
        let base = Base::open(layout, spec)?;
        steps.done("image opened");
        let kernel = kernel::path(layout, spec.platform)?;
        steps.done("kernel opened");
        let network = PlannedNetwork::new(layout, spec, caps, secrets)?;
        steps.done("network opened");
        let found = granted::find(layout, caps, &spec.locations)?;
        let is_socket = |(found, _): &(Found, Folder)| found.metadata().file_type().is_socket();
        let (sockets, folders) = found.into_iter().partition::<Vec<_>, _>(is_socket);
        let folders = Share::open_all(layout, caps, folders)?;
        let sockets = Socket::open_all(layout, sockets)?;
        steps.done("folders opened");
        let no_disk = spec.read_only || spec.depot.is_some();
        let disk = match (no_disk, caps.disk_bytes(), &spec.disk) {
            (false, Some(bytes), Some(path)) => Some(disk::keep(layout, path, bytes)?),
            (false, Some(bytes), None) => Some(private_disk(layout, spec, bytes)?),
            _ => None,
        };
        let keeps_disk = disk.is_some() && (spec.disk.is_some() || spec.keeps_disk);
        let (disks, image) = match base {
            Base::Image(rootfs, image) => (disks(layout, caps, rootfs, disk)?, *image),
            Base::Depot(depot) => (vec![Device::Folder(*depot)], ImageConfig::default()),
        };
        if spec.plug && network.is_some() {
            return Err(CellError::Usage(
                "a cell that is plugged into a network is granted nothing of another".to_owned(),
            ));
        }
        let devices = devices(caps, disks, network.is_some() || spec.plug, folders);
        steps.done("disks opened");
        let initramfs = initramfs::prepare(layout)?;
        steps.done("initramfs opened");
        Ok(Self {
            platform,
            kernel,
            initramfs,
            memory: GuestMemory::new(memory_bytes)
                .map_err(CellError::host("cannot make guest memory"))?,
            limits: Limits::new(memory_bytes, caps.require_process_max()?.into()),
            pager: spec.pager,
            blocks: blocks(spec)?,
            mappings_max: host::mappings_max(),
            guarantee_bytes: guarantee(spec, memory_bytes)?,
            budget: layout.budget(),
            intra: spec.intra,
            shares_image: image::is_shared(spec).map_err(CellError::Usage)?,
            vcpus: cpu.count,
            cpu_weight: cpu.weight,
            deadline: caps.deadline(),
            stdio: caps.stdio(),
            boot: boot(spec, caps, network.as_ref(), &devices, &sockets)?,
            sockets,
            network,
            start: match spec.idle {
                true => Start::default(),
                false => start(spec, caps, &image, tty)?,
            },
            health: match spec.idle {
                true => None,
                false => health(spec, &image)?,
            },
            keeps_disk,
            devices,
        })
    }

    /// Gives the private overlay a name in the record of the cell, which thereby keeps it.
    pub(crate) fn keep_disk(&self, record: &Record) -> Result<(), CellError> {
        let Some(disk) = device::overlay(&self.devices) else { return Ok(()) };
        let path = record.disk();
        disk::name_first(disk, &path)
            .map_err(CellError::host(format!("cannot make the disk {}", path.display())))
    }

    /// Starts the processes that serve its folders, and those that connect to its sockets. The caller must have one thread.
    pub(crate) fn start_folders(&mut self, cell: &str) -> Result<(), CellError> {
        let (platform, memory) = (self.platform.kind(), self.memory.file());
        let weight = self.cpu_weight;
        self.sockets.iter_mut().try_for_each(|socket| socket.start(weight, cell))?;
        self.devices.iter_mut().try_for_each(|device| match device {
            Device::Folder(share) => share.start(platform, memory, weight),
            _ => Ok(()),
        })
    }
}

/// What is below all that a guest's programs see.
enum Base {
    /// The file system of an image.
    Image(Rootfs, Box<ImageConfig>),
    /// A directory that holds roots of containers.
    Depot(Box<Share>),
}

impl Base {
    fn open(layout: &Layout, spec: &CellSpec) -> Result<Self, CellError> {
        let Some(depot) = &spec.depot else {
            let store = Store::open(layout.images())?;
            let image = store.resolve(spec.image_name())?;
            return Ok(Self::Image(store.open_rootfs(&image)?, Box::new(image.config)));
        };
        match spec.idle {
            true => Share::open_depot(depot).map(Box::new).map(Self::Depot),
            false => Err(CellError::Usage(
                "a cell with a depot runs no program of its own (idle)".to_owned(),
            )),
        }
    }
}

/// The disks of a guest with this root file system and private overlay, which a read-only root has
/// not.
fn disks(
    layout: &Layout,
    caps: &CapabilitySet,
    rootfs: Rootfs,
    overlay: Option<File>,
) -> Result<Vec<Device>, CellError> {
    let broken = |error| CellError::Usage(format!("the image cannot be a disk: {error}"));
    let rootfs = device::contents(rootfs).map_err(broken)?;
    // Other containers have their changes on the overlay's disk, too.
    let mut disks = vec![match overlay {
        Some(_) => Device::windowed_disk(ROOT_DISK, rootfs),
        None => Device::shared_disk(ROOT_DISK, rootfs),
    }];
    disks.extend(overlay.map(Device::overlay_disk));
    if caps.spawn_max() > 0 {
        disks.push(Device::shared_disk(COMMAND_DISK, command::prepare(layout)?));
        let models = models::prepare(layout, caps.models())?;
        disks.extend(models.map(|file| Device::shared_disk(MODELS_DISK, file)));
    }
    Ok(disks)
}

/// All devices of a guest.
fn devices(
    caps: &CapabilitySet,
    disks: Vec<Device>,
    has_network: bool,
    folders: Vec<Share>,
) -> Vec<Device> {
    let mut devices = disks;
    devices.extend([Device::Console, Device::Vsock]);
    devices.extend(caps.random().then_some(Device::Entropy));
    devices.extend(has_network.then_some(Device::Network));
    devices.extend(folders.into_iter().map(Device::Folder));
    devices
}

/// What the cell left at its last end; a new one where it left none.
fn private_disk(layout: &Layout, spec: &CellSpec, bytes: u64) -> Result<File, CellError> {
    let path = Record::at(layout, &spec.id).disk();
    let open = || File::options().read(true).write(true).open(&path);
    match spec.keeps_disk.then(open) {
        None => disk::create(layout, bytes, Life::OneCell),
        Some(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            disk::create(layout, bytes, Life::Kept)
        }
        Some(opened) => {
            let failed = CellError::host(format!("cannot open the disk {}", path.display()));
            let disk = opened.map_err(failed)?;
            disk::hold(&disk).map(|()| disk)
        }
    }
}

/// Not with `mpk`, where all that the guest kernel has mapped needs a key.
fn blocks(spec: &CellSpec) -> Result<bool, CellError> {
    let wanted = exocell_pager::blocks::wanted().map_err(CellError::Usage)?;
    let binds = matches!(spec.pager, Mode::Eager | Mode::Cold | Mode::Credit);
    Ok(wanted && binds && spec.intra != Intra::Mpk)
}

/// A guest's root is its image; a folder cannot stand in its place.
fn refuse_root_folder(caps: &CapabilitySet) -> Result<(), CellError> {
    match caps.folders().iter().find(|folder| folder.guest == Path::new("/")) {
        Some(folder) => Err(CellError::Usage(format!(
            "the folder {} cannot be the root of a vm cell; give it a path below / (--volume)",
            folder.host.display()
        ))),
        None => Ok(()),
    }
}

/// File systems of the guest's kernel, which no folder can hide.
const KERNELS_OWN: [&str; 3] = ["/proc", "/sys", "/dev"];

/// A folder there would not be seen, or would keep programs from what they need. Single files in
/// `/dev` are seen.
fn refuse_kernels_own(caps: &CapabilitySet) -> Result<(), CellError> {
    let is_there = |folder: &&Folder| {
        KERNELS_OWN.iter().any(|own| folder.guest == Path::new(own))
            || ["/proc", "/sys"].iter().any(|own| folder.guest.starts_with(own))
    };
    match caps.folders().iter().find(is_there) {
        Some(folder) => Err(CellError::Usage(format!(
            "the folder {} cannot be at {}, where the guest's kernel has files of its own; give it \
             another path (--volume)",
            folder.host.display(),
            folder.guest.display()
        ))),
        None => Ok(()),
    }
}

/// Layers over folders are the isolate host's.
fn refuse_layers(caps: &CapabilitySet) -> Result<(), CellError> {
    match caps.folders().iter().find(|folder| folder.rights.contains(Rights::OVERLAY)) {
        Some(folder) => Err(CellError::Usage(format!(
            "the folder {} has the right `overlay`, which is for isolates; give a vm cell `read` or `write` (--volume ...:ro, :rw)",
            folder.guest.display()
        ))),
        None => Ok(()),
    }
}

/// Bytes of the host's memory; 0 where it does not say.
pub fn host_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Whether a vm cell may have so much memory.
///
/// # Errors
/// It is too little for a guest, or more than the host has.
pub fn check_memory(bytes: u64) -> Result<(), CellError> {
    if bytes < MEMORY_BYTES_MIN {
        return Err(CellError::Usage(format!(
            "{bytes} bytes of memory are too few for a vm cell; grant at least {} MiB (memory.limit, --memory)",
            MEMORY_BYTES_MIN >> 20
        )));
    }
    let host = host_memory();
    if host > 0 && bytes > host {
        return Err(CellError::Usage(format!(
            "{bytes} bytes of memory are more than the host has; grant at most {} MiB (memory.limit, --memory)",
            host >> 20
        )));
    }
    Ok(())
}

fn memory(caps: &CapabilitySet) -> Result<u64, CellError> {
    let bytes = caps.require_memory_bytes()?;
    check_memory(bytes)?;
    // The guest kernel wants whole pages.
    Ok(bytes & !(PAGE_BYTES - 1))
}

fn guarantee(spec: &CellSpec, memory_bytes: u64) -> Result<u64, CellError> {
    if spec.pager != Mode::Credit {
        return match spec.memory_guarantee {
            None => Ok(memory_bytes),
            Some(_) => Err(CellError::Usage(
                "memory is guaranteed to cells that have it by credit; add --pager credit"
                    .to_owned(),
            )),
        };
    }
    // Whole pages: a limit need not be a whole number of them.
    let least = exocell_pager::guarantee_bytes_min(memory_bytes).next_multiple_of(PAGE_BYTES);
    let least = least.min(memory_bytes);
    let guarantee_bytes = spec.memory_guarantee.unwrap_or(least) & !(PAGE_BYTES - 1);
    if guarantee_bytes < least || guarantee_bytes > memory_bytes {
        return Err(CellError::Usage(format!(
            "{guarantee_bytes} bytes cannot be guaranteed to this cell; choose {} to {} MiB (--memory-guarantee)",
            least.div_ceil(1 << 20),
            memory_bytes >> 20
        )));
    }
    Ok(guarantee_bytes)
}

fn boot(
    spec: &CellSpec,
    caps: &CapabilitySet,
    network: Option<&PlannedNetwork>,
    devices: &[Device],
    sockets: &[Socket],
) -> Result<Boot, CellError> {
    let own = device::folders(devices).filter(|share| share.tag() != DEPOT);
    let mut folders = Share::mounts(own, spec);
    folders.extend(sockets.iter().map(Socket::mount));
    // What is mounted below another comes after it.
    folders.sort_by_key(|mount| Path::new(&mount.guest_path).components().count());
    Ok(Boot {
        hostname: match spec.idle {
            // Nobody is to find that it was there.
            true => String::new(),
            false => spec.hostname.clone().unwrap_or_else(|| spec.id[..12].to_owned()),
        },
        root_device: device::disk_path(devices, ROOT_DISK).unwrap_or_default(),
        overlay_device: device::overlay_path(devices),
        process_count_max: caps.require_process_max()?.into(),
        depot: spec.depot.as_ref().map(|_| DEPOT.to_owned()),
        folders,
        hosts: spec.settings.hosts.clone(),
        domain_name: spec.settings.domain_name.clone().unwrap_or_default(),
        network: network.map(PlannedNetwork::setup),
        isolates: (caps.spawn_max() > 0).then(|| isolates(caps, devices)).transpose()?,
    })
}

/// What isolates in the guest are to be bounded by. Each is a process there at least.
fn isolates(caps: &CapabilitySet, devices: &[Device]) -> Result<IsolatesSetup, CellError> {
    let overlay = device::overlay(devices).is_some();
    Ok(IsolatesSetup {
        device: device::disk_path(devices, COMMAND_DISK).unwrap_or_default(),
        models_device: device::disk_path(devices, MODELS_DISK),
        table: caps.handed_on(overlay, Path::new(ISOLATES_MODELS))?.to_json(),
        count_max: caps.spawn_max().min(caps.require_process_max()?),
    })
}

/// The program of a cell and its arguments: the image's, as far as `spec` does not say.
#[must_use]
pub fn words(spec: &CellSpec, image: &ImageConfig) -> Vec<String> {
    let mut args = spec.entrypoint.clone().unwrap_or_else(|| image.entrypoint.clone());
    if !spec.command.is_empty() {
        args.extend(spec.command.iter().cloned());
    } else if spec.entrypoint.is_none() {
        args.extend(image.cmd.iter().cloned());
    }
    args
}

/// The program of the cell: the image's, as far as `spec` does not say.
pub(crate) fn start(
    spec: &CellSpec,
    caps: &CapabilitySet,
    image: &ImageConfig,
    tty: Option<TtySize>,
) -> Result<Start, CellError> {
    let args = words(spec, image);
    if args.is_empty() {
        return Err(CellError::Usage(format!(
            "the image {} names no program; say one after the image",
            spec.image
        )));
    }
    let program = oci::Program {
        args,
        env: environment(&image.env, &spec.env, spec.tty),
        cwd: directory(spec, image),
        user: user(spec, image),
        tty: spec.tty.then(|| tty.unwrap_or(TTY_SIZE_DEFAULT)),
        read_only: spec.read_only,
    };
    let wanted = oci::spec(program, &spec.settings, caps)?;
    Ok(Start { spec: wanted, stdin: spec.stdin && caps.stdio(), ..Start::default() })
}

/// How the program of the cell is looked after: as `spec` says, or else its image.
pub(crate) fn health(spec: &CellSpec, image: &ImageConfig) -> Result<Option<Check>, CellError> {
    let Some(wanted) = merged(spec.health.as_ref(), image.healthcheck.as_ref()) else {
        return Ok(None);
    };
    let beside = Exec {
        env: environment(&image.env, &spec.env, false),
        cwd: directory(spec, image),
        user: user(spec, image),
        ..Exec::default()
    };
    Check::new(&wanted, &image.shell, beside).map_err(CellError::Usage)
}

fn directory(spec: &CellSpec, image: &ImageConfig) -> String {
    spec.working_dir.clone().unwrap_or_else(|| non_empty(&image.working_dir, "/"))
}

fn user(spec: &CellSpec, image: &ImageConfig) -> String {
    spec.user.clone().unwrap_or_else(|| image.user.clone())
}

/// The environment of one more program in the cell of `spec`: what the cell's own has, of its image
/// too, and then `own`.
#[must_use]
pub fn environment_beside(
    layout: &Layout,
    spec: &CellSpec,
    own: &[String],
    tty: bool,
) -> Vec<String> {
    let image = Store::open(layout.images()).and_then(|store| store.resolve(spec.image_name()));
    // Nobody can have removed the image of a cell that runs, but what cannot be read is none.
    let image = image.map_or_else(|_| Vec::new(), |image| image.config.env);
    environment(&environment(&image, &spec.env, false), own, tty)
}

/// Later entries of the same name win.
pub fn environment(image: &[String], own: &[String], tty: bool) -> Vec<String> {
    let term = if tty { &["TERM=xterm".to_owned()][..] } else { &[] };
    let defaults = [PATH_DEFAULT.to_owned()];
    let mut merged: Vec<String> = Vec::new();
    for entry in defaults.iter().chain(term).chain(image).chain(own) {
        let name = entry.split('=').next().unwrap_or_default();
        merged.retain(|known| known.split('=').next() != Some(name));
        merged.push(entry.clone());
    }
    merged
}

fn non_empty(text: &str, default: &str) -> String {
    if text.is_empty() { default } else { text }.to_owned()
}

/// Whether `path` is a Wasm module by its first bytes or its name.
pub fn is_module(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "wasm" || extension == "wat")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_the_limit_is_so_much_as_a_kernel_needs_can_be_guaranteed() {
        let spec = CellSpec::idle("image", "{}".to_owned()).unwrap();
        for bytes in [32 << 20, 100_000_000, 128_000_000, 1_000_000_000, (1 << 30) + 4096] {
            let memory_bytes = bytes & !(PAGE_BYTES - 1);
            let guaranteed = guarantee(&spec, memory_bytes).unwrap();
            assert!(guaranteed.is_multiple_of(PAGE_BYTES) && guaranteed <= memory_bytes, "{bytes}");
        }
    }

    #[test]
    fn memory_is_more_than_a_guest_needs_and_less_than_the_host_has() {
        assert!(host_memory() > MEMORY_BYTES_MIN);
        check_memory(MEMORY_BYTES_MIN).unwrap();
        check_memory(host_memory()).unwrap();
        for (bytes, word) in [
            (MEMORY_BYTES_MIN - 1, "too few"),
            (host_memory() + 1, "more than the host has"),
            (u64::MAX, "more than the host has"),
        ] {
            let error = check_memory(bytes).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("--memory"), "{error}");
        }
    }
}
