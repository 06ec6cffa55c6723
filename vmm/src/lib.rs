pub mod devices;
pub mod host;
pub mod intra;
pub mod jail;
pub mod limits;
pub mod memory;
pub mod para;
