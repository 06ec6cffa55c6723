//! `exocell doctor`: what this host offers, and what each lack costs.

use exocell_cell::exovisor::Slots;
use exocell_cell::vmm::host::{self, Feature};
use exocell_cell::{CellError, initramfs};

use super::print_json;
use crate::args::DoctorArgs;
use crate::show;

/// Exit code 1 when something is missing that every cell needs.
pub fn doctor(args: &DoctorArgs) -> Result<u8, CellError> {
    let mut features = host::probe();
    features.push(colorguard());
    features.push(init());
    if args.json {
        for feature in &features {
            print_json(feature, false)?;
        }
    } else {
        let rows: Vec<Vec<String>> = features
            .iter()
            .map(|feature| {
                let usable = if feature.usable { "yes" } else { "no" };
                vec![feature.name.to_owned(), usable.to_owned(), feature.why.clone()]
            })
            .collect();
        show::table(&["FEATURE", "USABLE", "WHY"], &rows);
    }
    Ok(u8::from(features.iter().any(|feature| feature.required && !feature.usable)))
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
