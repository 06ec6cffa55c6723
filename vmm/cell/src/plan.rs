//! The checked plan: everything a cell needs, found and opened, before any
//! process is made for it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use exocell_agent::{Boot, ISOLATES_MODELS, IsolatesSetup, Start, TtySize};
use exocell_images::{ImageConfig, Store};
use exocell_kernel::Status as KernelStatus;
use exocell_network::Secret;
use exocell_pager::Mode;
use exocell_vmm::host;
use exocell_vmm::intra::Intra;
use exocell_vmm::limits::Limits;
use exocell_vmm::memory::GuestMemory;
use exocell_xgate::{CapabilitySet, Folder, Rights};

use crate::folder::Share;
use crate::network::PlannedNetwork;
use crate::parent::Parent;
use crate::{CellError, CellSpec, Layout, command, disk, initramfs, models, oci};

/// Names a guest kernel to use instead of the built one.
pub const KERNEL_VARIABLE: &str = "EXOCELL_KERNEL";
/// Less memory than this and the guest kernel does not reach its init.
pub const MEMORY_BYTES_MIN: u64 = 24 << 20;
/// The guest kernel is built for this many.
pub const VCPUS_MAX: u32 = 16;
/// The terminal of a program whose operator has none.
pub const TTY_SIZE_DEFAULT: TtySize = TtySize { rows: 24, cols: 80 };
const PATH_DEFAULT: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A `vm` cell that can be started.
pub struct VmPlan {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// The image's erofs file system, held against removal.
    pub rootfs: File,
    /// The private overlay; `None` for a read-only root.
    pub disk: Option<File>,
    /// The command's file system; `None` where the cell starts no isolates.
    pub command: Option<File>,
    /// The file system with the models of its isolates, if they have any.
    pub models: Option<File>,
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
    pub vcpus: u32,
    pub cpu_weight: u32,
    pub deadline: Option<Duration>,
    /// Whether the guest has an entropy device.
    pub entropy: bool,
    /// Whether anyone hears what the program writes.
    pub stdio: bool,
    pub folders: Vec<Share>,
    /// `None`: no network device.
    pub network: Option<PlannedNetwork>,
    pub boot: Boot,
    pub start: Start,
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
        let memory_bytes = memory(caps)?;
        let cpu = caps.require_cpu()?;
        if cpu.count == 0 || cpu.count > VCPUS_MAX {
            return Err(CellError::Usage(format!(
                "{} vCPUs are not possible; grant 1 to {VCPUS_MAX} (cpu.count, --cpus)",
                cpu.count
            )));
        }
        refuse_root_folder(caps)?;
        refuse_layers(caps)?;
        let store = Store::open(layout.images())?;
        let image = store.resolve(&spec.image)?;
        let rootfs = store.open_rootfs(&image)?;
        let kernel = kernel(layout)?;
        let network = PlannedNetwork::new(spec, caps, secrets)?;
        let folders = Share::open_all(layout, caps, &spec.locations)?;
        let isolates = caps.spawn_max() > 0;
        let disk = match (spec.read_only, caps.disk_bytes(), &spec.disk) {
            (false, Some(bytes), Some(path)) => Some(disk::keep(layout, path, bytes)?),
            (false, Some(bytes), None) => Some(disk::create(layout, bytes)?),
            _ => None,
        };
        Ok(Self {
            kernel,
            initramfs: initramfs::prepare(layout)?,
            rootfs,
            memory: GuestMemory::new(memory_bytes)
                .map_err(CellError::host("cannot make guest memory"))?,
            limits: Limits::new(memory_bytes, caps.require_process_max()?.into()),
            pager: spec.pager,
            blocks: blocks(spec)?,
            mappings_max: host::mappings_max(),
            guarantee_bytes: guarantee(spec, memory_bytes)?,
            budget: layout.budget(),
            intra: spec.intra,
            vcpus: cpu.count,
            cpu_weight: cpu.weight,
            deadline: caps.deadline(),
            entropy: caps.random(),
            stdio: caps.stdio(),
            boot: boot(spec, caps, disk.is_some(), network.as_ref(), &folders)?,
            network,
            start: match spec.idle {
                true => Start::default(),
                false => start(spec, caps, &image.config, tty)?,
            },
            keeps_disk: disk.is_some() && spec.disk.is_some(),
            disk,
            command: isolates.then(|| command::prepare(layout)).transpose()?,
            models: isolates.then(|| models::prepare(layout, caps.models())).transpose()?.flatten(),
            folders,
        })
    }

    /// Starts the processes that serve its folders. The caller must have one thread.
    pub(crate) fn start_folders(&mut self) -> Result<(), CellError> {
        let (memory, weight) = (self.memory.file(), self.cpu_weight);
        self.folders.iter_mut().try_for_each(|folder| folder.start(memory, weight))
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

fn memory(caps: &CapabilitySet) -> Result<u64, CellError> {
    let bytes = caps.require_memory_bytes()?;
    if bytes < MEMORY_BYTES_MIN {
        return Err(CellError::Usage(format!(
            "{bytes} bytes of memory are too few for a vm cell; grant at least {} MiB (memory.limit, --memory)",
            MEMORY_BYTES_MIN >> 20
        )));
    }
    // The guest kernel wants whole pages.
    Ok(bytes & !4095)
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
    let least = exocell_pager::guarantee_bytes_min(memory_bytes);
    let guarantee_bytes = spec.memory_guarantee.unwrap_or(least) & !4095;
    if guarantee_bytes < least || guarantee_bytes > memory_bytes {
        return Err(CellError::Usage(format!(
            "{guarantee_bytes} bytes cannot be guaranteed to this cell; choose {} to {} MiB (--memory-guarantee)",
            least.div_ceil(1 << 20),
            memory_bytes >> 20
        )));
    }
    Ok(guarantee_bytes)
}

pub(crate) fn kernel(layout: &Layout) -> Result<PathBuf, CellError> {
    if let Some(path) = std::env::var_os(KERNEL_VARIABLE).filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    match exocell_kernel::status(&layout.kernels())? {
        KernelStatus::Present(kernel) => Ok(kernel.path),
        KernelStatus::Absent { path, .. } => Err(CellError::Usage(format!(
            "the guest kernel {} is missing; run exocell kernel build",
            path.display()
        ))),
    }
}

fn boot(
    spec: &CellSpec,
    caps: &CapabilitySet,
    overlay: bool,
    network: Option<&PlannedNetwork>,
    folders: &[Share],
) -> Result<Boot, CellError> {
    Ok(Boot {
        hostname: match spec.idle {
            // Nobody is to find that it was there.
            true => String::new(),
            false => spec.hostname.clone().unwrap_or_else(|| spec.id[..12].to_owned()),
        },
        root_device: "/dev/vda".to_owned(),
        overlay_device: overlay.then(|| "/dev/vdb".to_owned()),
        process_count_max: caps.require_process_max()?.into(),
        folders: Share::mounts(folders),
        hosts: spec.settings.hosts.clone(),
        domain_name: spec.settings.domain_name.clone().unwrap_or_default(),
        network: network.map(PlannedNetwork::setup),
        isolates: (caps.spawn_max() > 0).then(|| isolates(caps, overlay)).transpose()?,
    })
}

/// What isolates in the guest are to be bounded by. Each is a process there at least.
fn isolates(caps: &CapabilitySet, overlay: bool) -> Result<IsolatesSetup, CellError> {
    // The disks are named in the order in which they are attached.
    let (command, models) =
        if overlay { ("/dev/vdc", "/dev/vdd") } else { ("/dev/vdb", "/dev/vdc") };
    Ok(IsolatesSetup {
        device: command.to_owned(),
        models_device: (!caps.models().is_empty()).then(|| models.to_owned()),
        table: caps.handed_on(overlay, Path::new(ISOLATES_MODELS))?.to_json(),
        count_max: caps.spawn_max().min(caps.require_process_max()?),
    })
}

/// The program of the cell: the image's, as far as `spec` does not say.
pub(crate) fn start(
    spec: &CellSpec,
    caps: &CapabilitySet,
    image: &ImageConfig,
    tty: Option<TtySize>,
) -> Result<Start, CellError> {
    let mut args = spec.entrypoint.clone().unwrap_or_else(|| image.entrypoint.clone());
    if !spec.command.is_empty() {
        args.extend(spec.command.iter().cloned());
    } else if spec.entrypoint.is_none() {
        args.extend(image.cmd.iter().cloned());
    }
    if args.is_empty() {
        return Err(CellError::Usage(format!(
            "the image {} names no program; say one after the image",
            spec.image
        )));
    }
    let program = oci::Program {
        args,
        env: environment(&image.env, &spec.env, spec.tty),
        cwd: spec.working_dir.clone().unwrap_or_else(|| non_empty(&image.working_dir, "/")),
        user: spec.user.clone().unwrap_or_else(|| image.user.clone()),
        tty: spec.tty.then(|| tty.unwrap_or(TTY_SIZE_DEFAULT)),
        read_only: spec.read_only,
    };
    let wanted = oci::spec(program, &spec.settings, caps)?;
    Ok(Start { spec: wanted, stdin: spec.stdin && caps.stdio() })
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
