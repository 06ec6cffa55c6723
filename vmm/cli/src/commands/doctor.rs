//! `exocell doctor`: what this host offers, and what each lack costs.

use exocell_cell::exovisor::Slots;
use exocell_cell::plan::kernel::Wishes;
use exocell_cell::vmm::host::{self, Feature};
use exocell_cell::{CellError, Layout, initramfs};

use super::containerd;
use crate::args::DoctorArgs;

/// Exit code 1 when something is missing that every cell needs.
pub fn doctor(layout: &Layout, args: &DoctorArgs) -> Result<u8, CellError> {
    let mut features = host::probe();
    features.push(platform(layout, &features));
    features.push(colorguard());
    features.push(init());
    features.push(containerd::feature(layout));
    containerd::show_features(&features, args.json)?;
    Ok(u8::from(features.iter().any(|feature| feature.required && !feature.usable)))
}

/// What `--platform auto` is here. All cells that are not told otherwise run on `para`.
fn platform(layout: &Layout, known: &[Feature]) -> Feature {
    let kvm = known.iter().find(|feature| feature.name == "kvm");
    let why = match kvm.is_some_and(|kvm| kvm.usable) {
        false => "para for all cells; kvm cannot be used".to_owned(),
        true => match exocell_cell::plan::kernel::check_kvm(layout, Wishes::default()) {
            Ok(()) => "para; kvm with --platform kvm, or auto".to_owned(),
            Err(why) => format!("para; for --platform kvm: {why}"),
        },
    };
    Feature { name: "platform", usable: true, why, required: false }
}

/// Whether the guest init is there, which each vm cell begins with.
fn init() -> Feature {
    let found = initramfs::init();
    let why = match &found {
        Ok(path) => format!("vm cells begin with {}", path.display()),
        Err(error) => error.to_string(),
    };
    Feature { name: "guest-init", usable: found.is_ok(), why, required: true }
}

/// Whether the slots of isolates share their guard regions.
fn colorguard() -> Feature {
    let usable = Slots::share_guards();
    let why = if usable {
        "isolates lie side by side, told apart by protection keys"
    } else {
        "no protection keys that the engine uses: each isolate has guard regions of its own, \
         which take address space only"
    };
    Feature { name: "colorguard", usable, why: why.to_owned(), required: false }
}
