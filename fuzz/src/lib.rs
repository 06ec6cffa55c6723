//! Fuzz targets for everything that reads what a guest, a client, an archive or
//! a file says. Whatever the bytes, a target must not panic, hang or grow without end.
//!
//! One list, two drivers: `make fuzz` runs [`TARGETS`] under libFuzzer, guided
//! by coverage (`src/bin/fuzz.rs`); `make test` runs each over its seeds and a
//! fixed number of their mutations (`tests/smoke.rs`).
#![forbid(unsafe_code)]

mod agent;
mod builds;
mod caps;
mod devices;
mod folders;
mod frontend;
mod hostcalls;
mod images;
mod isolates;
pub mod mutate;
mod network;
mod pager;
mod programs;
mod service;
mod sessions;

/// One reader of hostile bytes.
#[derive(Debug)]
pub struct Target {
    pub name: &'static str,
    /// What could crash or hang.
    pub run: fn(&[u8]),
    /// Well-formed inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Every target.
pub const TARGETS: &[Target] = &[
    Target { name: "vhost_user", run: devices::messages, seeds: devices::message_seeds },
    Target { name: "virtqueues", run: devices::rings, seeds: devices::ring_seeds },
    Target { name: "vsock", run: devices::vsock, seeds: devices::vsock_seeds },
    Target { name: "pager_ring", run: pager::ring, seeds: pager::seeds },
    Target { name: "packets", run: network::packets, seeds: network::packet_seeds },
    Target { name: "guard", run: network::guard, seeds: network::guard_seeds },
    Target { name: "names", run: network::names, seeds: network::name_seeds },
    Target { name: "folder", run: folders::messages, seeds: folders::seeds },
    Target { name: "agent_frames", run: agent::frames, seeds: agent::seeds },
    Target { name: "agent_client", run: agent::client, seeds: agent::seeds },
    Target { name: "image_layer", run: images::layer, seeds: images::layer_seeds },
    Target { name: "image_archive", run: images::archive, seeds: images::archive_seeds },
    Target { name: "image_config", run: images::config, seeds: images::config_seeds },
    Target { name: "dockerfile", run: builds::text, seeds: builds::text_seeds },
    Target { name: "image_tree", run: builds::tree, seeds: builds::tree_seeds },
    Target { name: "session_files", run: sessions::files, seeds: sessions::file_seeds },
    Target { name: "module", run: isolates::admission, seeds: isolates::admission_seeds },
    Target { name: "isolate_threads", run: isolates::threads, seeds: isolates::thread_seeds },
    Target { name: "isolate_hostcalls", run: hostcalls::calls, seeds: hostcalls::seeds },
    Target { name: "isolate_programs", run: programs::run, seeds: programs::seeds },
    Target { name: "isolate_service", run: service::requests, seeds: service::request_seeds },
    Target { name: "caps_table", run: caps::table, seeds: caps::table_seeds },
    Target { name: "caps_flags", run: caps::flags, seeds: caps::flag_seeds },
];

/// The target called `name`.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Takes fields off the front of an input; zeros once it is used up.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn u8(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    pub fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    /// At most `count` bytes.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }
}
