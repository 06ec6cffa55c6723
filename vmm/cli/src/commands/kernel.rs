//! `exocell kernel`: the guest kernel's build and whether it is there.

use exocell_cell::kernel::{self, BuildOptions, Recipe, Status};
use exocell_cell::platform::PlatformKind;
use exocell_cell::{CellError, Layout};
use serde_json::json;

use super::print_json;
use crate::args::KernelCommand;
use crate::progress::KernelProgress;
use crate::show::say;

pub fn kernel(layout: &Layout, command: &KernelCommand) -> Result<u8, CellError> {
    let root = layout.kernels();
    match command {
        KernelCommand::Build { stock, platform } => {
            let mut progress = KernelProgress::new();
            let recipe = recipe(*stock, *platform);
            let options = BuildOptions { recipe, ..BuildOptions::from_env() };
            let built = kernel::build(&root, &options, &mut |step| progress.step(&step));
            progress.finish();
            say!("{}", built?.path.display());
            Ok(0)
        }
        KernelCommand::Status { stock, platform, json } => {
            let status = kernel::status_of(&recipe(*stock, *platform), &root)?;
            let flag = match (*stock, *platform) {
                (true, _) => " --stock",
                (false, PlatformKind::Para) => "",
                (false, PlatformKind::Kvm) => " --platform kvm",
            };
            show(&status, *json, flag)?;
            Ok(u8::from(!matches!(status, Status::Present(_))))
        }
    }
}

fn recipe(stock: bool, platform: PlatformKind) -> Recipe {
    match (stock, platform) {
        (true, _) => Recipe::stock(),
        (false, PlatformKind::Para) => Recipe::embedded(),
        (false, PlatformKind::Kvm) => Recipe::kvm(),
    }
}

/// `flag`: what the command that builds it is told besides.
fn show(status: &Status, json: bool, flag: &str) -> Result<(), CellError> {
    match status {
        Status::Present(kernel) if json => print_json(
            &json!({ "present": true, "path": kernel.path, "manifest": kernel.manifest }),
            true,
        ),
        Status::Absent { hash, path } if json => {
            print_json(&json!({ "present": false, "hash": hash, "path": path }), true)
        }
        Status::Present(kernel) => {
            say!("present: {}", kernel.path.display());
            Ok(())
        }
        Status::Absent { path, .. } => {
            say!("absent: {}; exocell kernel build{flag} makes it", path.display());
            Ok(())
        }
    }
}
