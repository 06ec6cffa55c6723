//! What the host keeps for one isolate: the data of its store.

use crate::hostcalls::builtins::Heap;
use crate::hostcalls::component::Wasi;
use crate::hostcalls::context::Attached;
use crate::hostcalls::limits::Limits;
use crate::hostcalls::threads::Threads;
use crate::preempt::Preemptible;
use crate::preempt::cancel::CancelHandle;
use std::sync::Arc;
use std::time::Instant;
use wasmtime::{Engine, Memory};

/// What the host keeps for one isolate.
pub(crate) struct State {
    /// `None` if the module imports nothing that needs it.
    pub attached: Option<Attached>,
    /// Once the program wanted memory from the host.
    pub heap: Option<Box<Heap>>,
    pub cancel: CancelHandle,
    pub limits: Limits,
    /// When a hostcall that waits is ended, unless a watch sees to it.
    pub deadline: Option<Instant>,
    /// The threads of an isolate that may have some.
    pub threads: Option<Arc<dyn Threads>>,
    /// Whether a loop of the host calls the program back.
    pub inside: bool,
    /// The memory that is packed while the call is hibernated, once there is one.
    pub memory: Option<Memory>,
    /// What a component's calls act on.
    pub wasi: Option<Box<Wasi>>,
}

impl State {
    pub fn new(
        attached: Option<Attached>,
        cancel: CancelHandle,
        bytes_max: u64,
        deadline: Option<Instant>,
    ) -> Self {
        let limits = Limits::new(bytes_max);
        Self {
            attached,
            heap: None,
            cancel,
            limits,
            deadline,
            threads: None,
            inside: false,
            memory: None,
            wasi: None,
        }
    }

    /// A call is over: lets go of what was its own.
    pub fn forget(&mut self) {
        (self.attached, self.heap, self.threads, self.memory) = (None, None, None, None);
    }

    /// What a component's calls act on; nothing, if it was given nothing.
    pub fn wasi(&mut self) -> &mut Wasi {
        self.wasi.get_or_insert_default()
    }

    /// For an instance that no tenant sees.
    pub fn detached(engine: &Engine) -> Self {
        Self::new(None, CancelHandle::new(None, Some(engine.clone())), 0, None)
    }
}

impl Preemptible for State {
    fn cancel_handle(&self) -> &CancelHandle {
        &self.cancel
    }

    fn memory(&self) -> Option<Memory> {
        self.memory
    }
}
