//! The devices of a `vm` cell in the order in which its guest has them.
//!
//! The plan lists each once. The sockets of the jail, the guest kernel's arguments, the threads that
//! serve them and the names of disks inside the guest are all derived from that list.

use std::fs::File;

use exocell_images::Rootfs;
use exocell_vmm::devices::{BlockConfig, Contents, DeviceError, Windows};
use exocell_vmm::platform::{DeviceSocket, VirtioId};

use crate::folder::Share;

/// The private overlay's disk.
const OVERLAY: &str = "disk";

/// A device, with what it is made of.
pub(crate) enum Device {
    Block(BlockConfig),
    Console,
    Vsock,
    Entropy,
    /// What its frames lead to is planned apart.
    Network,
    Folder(Share),
}

impl Device {
    /// A disk of which others may have a copy.
    pub fn shared_disk(id: &str, contents: impl Into<Contents>) -> Self {
        let (contents, id) = (contents.into(), id.to_owned());
        Self::Block(BlockConfig { contents, read_only: true, id, windows: None })
    }

    /// The same, behind which more files come and go.
    pub fn windowed_disk(id: &str, contents: Contents) -> Self {
        let windows = Some(Windows::default());
        Self::Block(BlockConfig { contents, read_only: true, id: id.to_owned(), windows })
    }

    /// The private overlay's.
    pub fn overlay_disk(file: File) -> Self {
        let id = OVERLAY.to_owned();
        Self::Block(BlockConfig { contents: file.into(), read_only: false, id, windows: None })
    }

    /// The name of its socket, no other device's.
    pub fn name(&self) -> &str {
        match self {
            Self::Block(config) => &config.id,
            Self::Console => "console",
            Self::Vsock => "vsock",
            Self::Entropy => "entropy",
            Self::Network => "network",
            Self::Folder(share) => share.tag(),
        }
    }

    /// How the guest kernel is told of it.
    pub fn socket(&self) -> DeviceSocket {
        let id = match self {
            Self::Block(_) => VirtioId::Block,
            Self::Console => VirtioId::Console,
            Self::Vsock => VirtioId::Vsock,
            Self::Entropy => VirtioId::Entropy,
            Self::Network => VirtioId::Net,
            Self::Folder(_) => VirtioId::Fs,
        };
        DeviceSocket { name: self.name().to_owned(), id }
    }
}

/// An image as a disk has it.
///
/// # Errors
/// The image says of itself what cannot be.
pub(crate) fn contents(image: Rootfs) -> Result<Contents, DeviceError> {
    let (files, pieces, bytes) = image.into_parts();
    let pieces = pieces.into_iter().map(|piece| (piece.start, piece.file)).collect();
    Contents::pieced(files, pieces, bytes)
}

/// The folders among `devices`.
pub(crate) fn folders(devices: &[Device]) -> impl Iterator<Item = &Share> {
    devices.iter().filter_map(|device| match device {
        Device::Folder(share) => Some(share),
        _ => None,
    })
}

/// The private overlay's file, if there is one among `devices`.
pub(crate) fn overlay(devices: &[Device]) -> Option<&File> {
    devices.iter().find_map(|device| match device {
        Device::Block(config) if config.id == OVERLAY => config.contents.only(),
        _ => None,
    })
}

/// What the disk `id` among `devices` holds, if it is the guest's first.
pub(crate) fn first_disk<'a>(devices: &'a [Device], id: &str) -> Option<&'a Contents> {
    match devices.first() {
        Some(Device::Block(config)) if config.id == id => Some(&config.contents),
        _ => None,
    }
}

/// Where the guest has the disk `id`; `None` if it is not among `devices`. The guest kernel names
/// disks in the order in which it finds them.
pub(crate) fn disk_path(devices: &[Device], id: &str) -> Option<String> {
    let disks = devices.iter().filter(|device| matches!(device, Device::Block(_)));
    let (_, letter) = disks.zip('a'..='z').find(|(disk, _)| disk.name() == id)?;
    Some(format!("/dev/vd{letter}"))
}

/// The path of the private overlay's disk.
pub(crate) fn overlay_path(devices: &[Device]) -> Option<String> {
    disk_path(devices, OVERLAY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_named_in_their_order_among_other_devices() {
        let file = || File::open("/dev/null").unwrap();
        let devices = [
            Device::shared_disk("rootfs", file()),
            Device::Console,
            Device::overlay_disk(file()),
            Device::shared_disk("models", file()),
        ];
        let path = |id| disk_path(&devices, id);
        assert_eq!(path("rootfs").as_deref(), Some("/dev/vda"));
        assert_eq!(overlay_path(&devices).as_deref(), Some("/dev/vdb"));
        assert_eq!(path("models").as_deref(), Some("/dev/vdc"));
        assert_eq!(path("console"), None);
        assert!(overlay(&devices).is_some() && folders(&devices).next().is_none());
    }
}
