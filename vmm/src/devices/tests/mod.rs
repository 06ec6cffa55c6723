//! The devices against a guest made by hand: `guest` speaks to a running loop as
//! virtio_uml does, `hostile` throws random rings and packets at the handlers.

mod block;
mod console;
mod fs;
mod guest;
mod hostile;
mod net;
mod rings;
mod vsock;
