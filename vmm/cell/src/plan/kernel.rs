//! What runs a guest, and the guest kernel for it.
//!
//! A cell runs on `para` unless it was asked otherwise ([`platform`]); what `auto` is depends on the
//! host and on what else is asked for ([`automatic`]). Read on in `exocell_vmm::platform`.

use std::path::PathBuf;

use exocell_kernel::{Recipe, Status};
use exocell_pager::Mode;
use exocell_vmm::host;
use exocell_vmm::intra::Intra;
use exocell_vmm::kvm::KvmPlatform;
use exocell_vmm::para::Para;
use exocell_vmm::platform::{Platform, PlatformKind};
use tracing::info;

use crate::{CellError, CellSpec, Layout};

/// Names a guest kernel to use instead of the built one.
pub const KERNEL_VARIABLE: &str = "EXOCELL_KERNEL";
/// The same for cells on `kvm`.
pub const KVM_KERNEL_VARIABLE: &str = "EXOCELL_KVM_KERNEL";

/// What a cell asks for that not every platform has.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wishes {
    /// As it was said.
    pub pager: Option<Mode>,
    pub intra: Intra,
    pub has_guarantee: bool,
    pub has_secrets: bool,
}

impl Wishes {
    fn of(spec: &CellSpec, has_secrets: bool) -> Self {
        Self {
            pager: Some(spec.pager),
            intra: spec.intra,
            has_guarantee: spec.memory_guarantee.is_some(),
            has_secrets,
        }
    }

    /// Whether `kvm` has all of it.
    ///
    /// # Errors
    /// The first that it has not, by its flag, and what to do.
    fn check_kvm(self) -> Result<(), String> {
        if self.has_guarantee {
            return Err(
                "--memory-guarantee is not there on the kvm platform yet, whose cells have no \
                 credit; leave it out, or choose --platform para"
                    .to_owned(),
            );
        }
        // Its process begins as a copy of the supervisor, which knows them.
        if self.has_secrets {
            return Err("--secret is not there on the kvm platform yet; leave it out, or choose \
                 --platform para"
                .to_owned());
        }
        KvmPlatform::check(self.pager.unwrap_or(Mode::Off), self.intra)
    }
}

/// What `--platform auto` is for a cell with `wishes`.
#[must_use]
pub fn automatic(layout: &Layout, wishes: Wishes) -> PlatformKind {
    match check_kvm(layout, wishes) {
        Ok(()) => PlatformKind::Kvm,
        Err(why) => {
            info!(why, "the platform is para");
            PlatformKind::Para
        }
    }
}

/// Whether a cell with `wishes` can run on `kvm`: the host's processor runs guests, their kernel is
/// there, and so is all that is wished for.
///
/// # Errors
/// What is missing.
pub fn check_kvm(layout: &Layout, wishes: Wishes) -> Result<(), String> {
    wishes.check_kvm()?;
    host::kvm()?;
    path(layout, PlatformKind::Kvm).map_err(|error| error.to_string())?;
    Ok(())
}

/// What runs the guest of `spec`, opened, if it can be as `spec` says.
pub(super) fn platform(spec: &CellSpec, has_secrets: bool) -> Result<Box<dyn Platform>, CellError> {
    match spec.platform {
        PlatformKind::Para => Ok(Box::new(Para)),
        PlatformKind::Kvm => {
            Wishes::of(spec, has_secrets).check_kvm().map_err(CellError::Usage)?;
            let opened = KvmPlatform::open();
            Ok(Box::new(opened.map_err(|error| CellError::Usage(error.to_string()))?))
        }
    }
}

/// Where the guest kernel for `platform` is.
pub(crate) fn path(layout: &Layout, platform: PlatformKind) -> Result<PathBuf, CellError> {
    let (recipe, variable, more) = match platform {
        PlatformKind::Para => (Recipe::embedded(), KERNEL_VARIABLE, ""),
        PlatformKind::Kvm => (Recipe::kvm(), KVM_KERNEL_VARIABLE, " --platform kvm"),
    };
    if let Some(path) = std::env::var_os(variable).filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    match exocell_kernel::status_of(&recipe, &layout.kernels())? {
        Status::Present(kernel) => Ok(kernel.path),
        Status::Absent { path, .. } => Err(CellError::Usage(format!(
            "the guest kernel {} is missing; run exocell kernel build{more}",
            path.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kvm_has_not_is_refused_by_its_flag() {
        Wishes::default().check_kvm().unwrap();
        Wishes { pager: Some(Mode::Off), ..Wishes::default() }.check_kvm().unwrap();
        for (wishes, flag) in [
            (Wishes { pager: Some(Mode::Credit), ..Wishes::default() }, "--pager credit"),
            (Wishes { intra: Intra::None, ..Wishes::default() }, "--intra none"),
            (Wishes { has_guarantee: true, ..Wishes::default() }, "--memory-guarantee"),
            (Wishes { has_secrets: true, ..Wishes::default() }, "--secret"),
        ] {
            let refused = wishes.check_kvm().unwrap_err();
            assert!(refused.contains(flag) && refused.contains("para"), "{refused}");
            // Nothing is opened for what cannot be.
            let nowhere = Layout::new("/nowhere");
            assert_eq!(check_kvm(&nowhere, wishes), Err(refused));
            assert_eq!(automatic(&nowhere, wishes), PlatformKind::Para);
        }
    }

    #[test]
    fn each_platform_has_a_kernel_of_its_own() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let missing = |platform| path(&layout, platform).unwrap_err().to_string();
        assert!(missing(PlatformKind::Kvm).ends_with("exocell kernel build --platform kvm"));
        assert!(missing(PlatformKind::Para).ends_with("exocell kernel build"));
    }
}
