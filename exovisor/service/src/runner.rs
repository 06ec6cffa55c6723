//! What runs calls, as seen by what takes them from clients.

use crate::call::{Done, Work};
use crate::loaded::Callable;
use std::pin::Pin;

/// Does what clients want: in this process, or in workers of other processes.
pub(crate) trait Runner: Send + Sync {
    /// Has a module do something. It takes no longer than the module's deadline and a little more.
    fn run<'a>(
        &'a self,
        callable: &'a Callable,
        work: Work,
    ) -> Pin<Box<dyn Future<Output = Done> + Send + 'a>>;
}
