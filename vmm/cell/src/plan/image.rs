//! Whose pages of its image a guest uses: those of the host's page cache, which all cells of the
//! image share, or copies of its own.

use exocell_vmm::devices::Pages;
use exocell_vmm::intra::Intra;
use exocell_vmm::platform::{Image, PlatformKind};

use super::device;
use super::{ROOT_DISK, VmPlan};
use crate::CellSpec;

/// Set to `own` or `shared`; the default is `shared`.
pub const IMAGE_PAGES_VARIABLE: &str = "EXOCELL_IMAGE_PAGES";

/// What the guest calls its first disk.
const DISK: &str = "vda";

/// Whether cells share pages of images, by what `value` says.
fn are_shared(value: Option<&str>) -> Result<bool, String> {
    match value {
        None | Some("" | "shared") => Ok(true),
        Some("own") => Ok(false),
        Some(other) => Err(format!(
            "{IMAGE_PAGES_VARIABLE} is {other:?}; set it to shared or own, or unset it"
        )),
    }
}

/// Whether a cell uses pages of its image as the host has them. Not with `mpk`, where the guest
/// kernel looks at all code before it runs and has copies of it, nor in a virtual machine, whose
/// memory is one file.
///
/// # Errors
/// The environment has something else of it.
pub(super) fn is_shared(spec: &CellSpec) -> Result<bool, String> {
    let value = std::env::var_os(IMAGE_PAGES_VARIABLE);
    let wanted = are_shared(value.map(|value| value.to_string_lossy().into_owned()).as_deref())?;
    Ok(wanted && spec.intra != Intra::Mpk && spec.platform == PlatformKind::Para)
}

impl VmPlan {
    /// The image's pages, if the guest is to use the host's.
    pub(crate) fn shared_image(&self) -> Option<Image<'_>> {
        let contents =
            device::first_disk(&self.devices, ROOT_DISK).filter(|_| self.shares_image)?;
        let Pages { files, pieces, bytes } = contents.pages()?;
        Some(Image { disk: DISK, bytes, files, pieces })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_variable_says_is_one_of_two_things() {
        assert_eq!(are_shared(None), Ok(true));
        assert_eq!(are_shared(Some("shared")), Ok(true));
        assert_eq!(are_shared(Some("own")), Ok(false));
        assert!(are_shared(Some("0")).unwrap_err().contains("shared or own"));
    }
}
