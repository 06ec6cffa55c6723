//! The network of a `vm` cell: a TCP/IP stack at the end of the guest's link,
//! and a dialer in the host's network that holds the policy.
pub mod address;
pub mod audit;
pub mod authority;
pub mod dialer;
pub mod dns;
pub mod link;
pub mod names;
pub mod packet;
pub mod policy;
pub mod secrets;
pub mod stack;

pub use policy::{Denied, Policy, Target};
pub use secrets::{Secret, Secrets};
