
pub mod host;
pub mod devices;
pub mod jail;
pub mod memory;
pub mod para;
