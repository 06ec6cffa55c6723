//! Go's bits for what is no plain file (`io/fs.FileMode`).

pub const DIRECTORY: u32 = 1 << 31;
pub const SYMLINK: u32 = 1 << 27;
pub const DEVICE: u32 = 1 << 26;
pub const PIPE: u32 = 1 << 25;
pub const SETUID: u32 = 1 << 23;
pub const SETGID: u32 = 1 << 22;
pub const CHARACTER: u32 = 1 << 21;
pub const STICKY: u32 = 1 << 20;
