//! The network of a cell: a TCP/IP stack at the end of a guest's link, or a relay
//! for a module's sockets, and a dialer in the host's network that holds the policy.
pub mod address;
pub mod audit;
pub mod authority;
pub mod dialer;
pub mod dns;
pub mod guard;
pub mod link;
pub mod names;
pub mod packet;
pub mod plug;
pub mod policy;
pub mod relay;
pub mod secrets;
pub mod stack;
pub mod switch;

pub use policy::{Denied, Policy, Target};
pub use secrets::{Secret, Secrets};
