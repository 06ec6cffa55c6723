//! `exocell containerd`: cells under an engine that is there already.

mod config;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use exocell_cell::kernel::{self, Recipe, Status};
use exocell_cell::vmm::host::Feature;
use exocell_cell::{CellError, Layout, initramfs};

use self::config::{Change, Version};
use super::print_json;
use crate::args::{ContainerdCommand, ContainerdPlaces};
use crate::show::{self, say};

/// The oldest containerd that the shim was run under.
const OLDEST: Version = Version { major: 1, minor: 6 };

pub fn containerd(layout: &Layout, command: &ContainerdCommand) -> Result<u8, CellError> {
    match command {
        ContainerdCommand::Install(args) => install(&args.places, args.dry_run),
        ContainerdCommand::Uninstall(args) => uninstall(&args.places, args.dry_run),
        ContainerdCommand::Status(args) => {
            let features = features(layout, &args.places);
            show_features(&features, args.json)?;
            Ok(u8::from(features.iter().any(|feature| !feature.usable)))
        }
    }
}

/// A feature a line, as a table or as JSON.
pub fn show_features(features: &[Feature], json: bool) -> Result<(), CellError> {
    if json {
        return features.iter().try_for_each(|feature| print_json(feature, false));
    }
    let row = |feature: &Feature| {
        let usable = if feature.usable { "yes" } else { "no" };
        vec![feature.name.to_owned(), usable.to_owned(), feature.why.clone()]
    };
    let rows: Vec<Vec<String>> = features.iter().map(row).collect();
    show::table(&["FEATURE", "USABLE", "WHY"], &rows);
    Ok(())
}

fn install(places: &ContainerdPlaces, dry_run: bool) -> Result<u8, CellError> {
    check_handler(&places.handler)?;
    let version = version().map_err(CellError::Usage)?;
    if version < OLDEST {
        return Err(CellError::Usage(format!(
            "containerd is {}.{}; the shim needs {}.{} or newer",
            version.major, version.minor, OLDEST.major, OLDEST.minor
        )));
    }
    let text = read(&places.config)?;
    let (handler, runtime) = (&places.handler, exocell_shim::RUNTIME);
    // Before anything is made: what cannot be done as a whole is not begun.
    let change = config::install(&places.config, text.as_deref(), version, handler, runtime)
        .map_err(CellError::Usage)?;
    let link = places.bin_dir.join(exocell_shim::NAME);
    let program = std::env::current_exe();
    let program = program.map_err(CellError::host("cannot find this program"))?;
    let is_linked = is_link_to(&link, &program);
    if !is_linked && link.symlink_metadata().is_ok_and(|found| !found.is_symlink()) {
        return Err(CellError::Usage(format!(
            "{} is there and no link; move it away",
            link.display()
        )));
    }
    let verb = if dry_run { "would link" } else { "linked" };
    if is_linked {
        say!("{} is there", link.display());
    } else {
        if !dry_run {
            put_link(&program, &link)?;
        }
        say!("{verb} {} to {}", link.display(), program.display());
    }
    match change {
        None => say!("{} has the runtime {handler}", places.config.display()),
        Some(change) => {
            make(&change, dry_run)?;
            if !dry_run {
                say!("restart containerd: systemctl restart containerd");
            }
        }
    }
    Ok(0)
}

fn uninstall(places: &ContainerdPlaces, dry_run: bool) -> Result<u8, CellError> {
    let link = places.bin_dir.join(exocell_shim::NAME);
    let mut count = 0;
    if fs::symlink_metadata(&link).is_ok_and(|found| found.is_symlink()) {
        if !dry_run {
            fs::remove_file(&link)
                .map_err(CellError::host(format!("cannot remove {}", link.display())))?;
        }
        say!("{} {}", if dry_run { "would remove" } else { "removed" }, link.display());
        count += 1;
    }
    for path in [config::drop_in(&places.config), places.config.clone()] {
        let text = read(&path)?;
        if let Some(change) = config::uninstall(&path, text.as_deref()) {
            make(&change, dry_run)?;
            count += 1;
        }
    }
    match count {
        0 => say!("there is nothing of exocell containerd install"),
        _ if !dry_run => say!("restart containerd: systemctl restart containerd"),
        _ => {}
    }
    Ok(0)
}

/// What containerd needs for cells, and whether it is there.
pub fn features(layout: &Layout, places: &ContainerdPlaces) -> Vec<Feature> {
    let feature = |name, found: Result<String, String>| {
        let usable = found.is_ok();
        let (Ok(why) | Err(why)) = found;
        Feature { name, usable, why, required: false }
    };
    let version = version().and_then(|own| match own >= OLDEST {
        true => Ok(format!("containerd {}.{}", own.major, own.minor)),
        false => Err(format!("containerd is {}.{}; 1.6 or newer is needed", own.major, own.minor)),
    });
    vec![
        feature("containerd", version),
        feature("shim", find_shim(places)),
        feature("runtime", find_runtime(places)),
        feature("guest-kernel", find_kernel(layout)),
        feature("guest-init", find_init()),
        feature("iproute2", find_ip()),
    ]
}

/// In one line, for `exocell doctor`.
pub fn feature(layout: &Layout) -> Feature {
    let places = ContainerdPlaces {
        config: "/etc/containerd/config.toml".into(),
        bin_dir: "/usr/local/bin".into(),
        handler: "exocell".to_owned(),
    };
    let of = |usable, why: String| Feature { name: "containerd", usable, why, required: false };
    let features = features(layout, &places);
    let missing: Vec<&str> =
        features.iter().filter(|own| !own.usable).map(|own| own.why.as_str()).collect();
    match features.first() {
        Some(first) if !first.usable => of(false, first.why.clone()),
        _ if missing.is_empty() => of(true, "its containers and pods can be cells".to_owned()),
        _ => of(false, missing.join("; ")),
    }
}

fn version() -> Result<Version, String> {
    let said = Command::new("containerd").arg("--version").output();
    let said = said.map_err(|error| format!("there is no containerd here ({error})"))?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    Version::parse(&said).ok_or_else(|| format!("containerd --version says {:?}", said.trim()))
}

fn find_shim(places: &ContainerdPlaces) -> Result<String, String> {
    let link = places.bin_dir.join(exocell_shim::NAME);
    let found = fs::metadata(&link);
    match found {
        Ok(found) if found.is_file() => Ok(link.display().to_string()),
        _ => Err(format!("there is no {}; exocell containerd install links it", link.display())),
    }
}

fn find_runtime(places: &ContainerdPlaces) -> Result<String, String> {
    let read = |path: &Path| read(path).map_err(|error| error.to_string());
    let text = read(&places.config)?;
    let own = read(&config::drop_in(&places.config))?;
    let runtime = exocell_shim::RUNTIME;
    config::check(&places.config, text.as_deref(), own.as_deref(), &places.handler, runtime)
}

fn find_kernel(layout: &Layout) -> Result<String, String> {
    match kernel::status_of(&Recipe::embedded(), &layout.kernels()) {
        Ok(Status::Present(kernel)) => Ok(kernel.path.display().to_string()),
        Ok(Status::Absent { path, .. }) => {
            Err(format!("there is no {}; exocell kernel build makes it", path.display()))
        }
        Err(error) => Err(error.to_string()),
    }
}

fn find_init() -> Result<String, String> {
    let found = initramfs::init().map_err(|error| error.to_string())?;
    Ok(found.display().to_string())
}

fn find_ip() -> Result<String, String> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut places = std::env::split_paths(&search).chain(more).map(|place| place.join("ip"));
    match places.find(|path| path.is_file()) {
        Some(path) => Ok(path.display().to_string()),
        None => Err("there is no ip; install iproute2, or pods have no network".to_owned()),
    }
}

/// One that can stand in a TOML table's name as it is.
fn check_handler(name: &str) -> Result<(), CellError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    match !name.is_empty() && name.chars().all(plain) {
        true => Ok(()),
        false => {
            Err(CellError::Usage(format!("--handler {name:?}: give letters, digits, - and _")))
        }
    }
}

fn read(path: &Path) -> Result<Option<String>, CellError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CellError::host(format!("cannot read {}", path.display()))(error)),
    }
}

fn is_link_to(link: &Path, program: &Path) -> bool {
    fs::read_link(link).is_ok_and(|target| target == program)
}

/// In the place of another at once: containerd may look at any time.
fn put_link(program: &Path, link: &Path) -> Result<(), CellError> {
    let new = link.with_extension("new");
    let _ = fs::remove_file(&new);
    symlink(program, &new)
        .and_then(|()| fs::rename(&new, link))
        .map_err(CellError::host(format!("cannot make {}", link.display())))
}

fn make(change: &Change, dry_run: bool) -> Result<(), CellError> {
    let Change { path, content } = change;
    let failed = || CellError::host(format!("cannot change {}", path.display()));
    let shown = path.display();
    match (content, dry_run) {
        (None, true) => say!("would remove {shown}"),
        (None, false) => {
            fs::remove_file(path).map_err(failed())?;
            say!("removed {shown}");
        }
        (Some(content), true) => say!("would write {shown}:\n{}", content.trim_end()),
        (Some(content), false) => {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder).map_err(failed())?;
            }
            let new = path.with_extension("toml.new");
            // With the rights that the old one has.
            if let Ok(found) = fs::metadata(path) {
                fs::write(&new, content).map_err(failed())?;
                fs::set_permissions(&new, found.permissions()).map_err(failed())?;
            } else {
                fs::write(&new, content).map_err(failed())?;
            }
            fs::rename(&new, path).map_err(failed())?;
            say!("wrote {shown}");
        }
    }
    Ok(())
}
