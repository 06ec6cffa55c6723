//! The devices that all programs may use.

/// Nodes of /dev that everyone may use (kernel: admin-guide/devices.txt). The
/// cell's disks are not among them: programs see file systems.
pub const NODES: [(&str, u64, u64); 8] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
    ("fuse", 10, 229),
    // Who owns no network namespace gets no device by it.
    ("net/tun", 10, 200),
];

/// The numbers of those, all of character devices.
pub fn numbers() -> impl Iterator<Item = (u32, u32)> {
    let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    NODES.into_iter().map(move |(_, major, minor)| (number(major), number(minor)))
}
